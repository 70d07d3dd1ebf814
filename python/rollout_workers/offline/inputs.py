"""Collects everything that the bytes of an output depend on, as nested names and values. A journal
is only continued with the same inputs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from rollout.config.v1.run_config_pb2 import EnvironmentConfig, RewardConfig, RewardPartConfig
from rollout.hosting.manifest import is_manifest, read_manifest
from rollout.plugin import split_plugin
from rollout.plugin.installed import is_installed, package
from rollout_workers.environments.registry import DEFAULT
from rollout_workers.offline.dataset import Dataset, digest
from rollout_workers.offline.spec import BatchSpec

_MODEL_FILES = (".json", ".jinja", ".model", ".txt")
_WEIGHTS = (".safetensors", ".bin")


def inputs_of(spec: BatchSpec, weights_digest: str, data: Dataset) -> dict[str, Any]:
    """weights_digest: of the tensors in the engine. Raises ``MissingFile`` if a file of the reward
    is missing."""
    config = spec.config
    sampling = json_format.MessageToDict(config.sampling, preserving_proto_field_name=True)
    sampling["samples"] = sampling.pop("group_size", 1)
    inputs = {
        "data": data.digest,
        "data_commit": data.commit,
        "rows": len(data.rows),
        "seed": int(config.seed),
        "sampling": sampling,
        "prompt": {
            "field": config.data.prompt_field,
            "chat_template": config.model.chat_template,
            "overlong": config.data.overlong,
        },
        "model": {
            "weights": weights_digest,
            "dtype": config.model.dtype,
            "files": {p.name: digest(str(p)) for p in _files(spec.model, _MODEL_FILES)},
        },
        "engine": {
            "slots": config.engine.slots,
            "max_model_len": config.engine.max_model_len,
            "threads": spec.threads,
        },
        "reward": _reward(config.reward, spec.base_dir) if config.HasField("reward") else None,
    }
    if config.environment.kind not in ("", DEFAULT):
        inputs["environment"] = _environment(config.environment, spec.base_dir)
    if spec.cluster:
        inputs["cluster"] = spec.cluster
    return inputs


def _environment(environment: EnvironmentConfig, base_dir: str) -> dict[str, Any]:
    """The settings of an environment, and the digest of its file."""
    given = json_format.MessageToDict(environment, preserving_proto_field_name=True)
    if environment.path:
        given["source"] = _plugin(environment.path, base_dir, "environment")
    return given


def _reward(reward: RewardConfig | RewardPartConfig, base_dir: str) -> dict[str, Any]:
    """The settings of a reward, and the digests of its files: a plugin's source or a reward
    model."""
    given = json_format.MessageToDict(reward, preserving_proto_field_name=True)
    if reward.HasField("plugin"):
        given["source"] = _plugin(reward.plugin, base_dir, "reward")
    if reward.HasField("model"):
        folder = os.path.join(base_dir, reward.model.path)
        given["model_files"] = {p.name: digest(str(p)) for p in _files(folder, _MODEL_FILES + _WEIGHTS)}
    if isinstance(reward, RewardConfig) and reward.composite:
        given["composite"] = {name: _reward(part, base_dir) for name, part in sorted(reward.composite.items())}
    return given


def _plugin(plugin: str, base_dir: str, kind: str) -> str | dict[str, str]:
    """The digest of the file of a plugin, or of its package, or of each file that its manifest
    names."""
    if is_installed(plugin):
        return package(plugin, kind).digest
    if is_manifest(plugin):
        manifest = read_manifest(plugin, base_dir, kind=kind)
        return {os.path.relpath(path, base_dir): digest(str(path)) for path in manifest.files}
    return digest(os.path.join(base_dir, split_plugin(plugin)[0]))


def _files(folder: str, endings: tuple[str, ...]) -> list[Path]:
    return sorted(p for p in Path(folder).glob("*") if p.suffix in endings and p.is_file())
