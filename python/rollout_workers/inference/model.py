"""Loads the engine and the tokenizer of an inference worker."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout.run.v1.run_pb2 import WorkerSpec
from rollout_workers.data.prompts import Text
from rollout_workers.devices import devices_of, repeat_bits
from rollout_workers.engines import registry
from rollout_workers.engines.base import Engine
from rollout_workers.weights.transfer.cache import ADAPTER_FILE
from rollout_workers.worker.spec import is_deterministic, model_directory

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Model:
    """The engine and the tokenizer of a worker."""

    engine: Engine
    text: Text
    merge: Callable[[Path], Mapping[str, Any]] | None = None
    """Merges a folder of adapters into full weights; None if the run does not train adapters."""
    kind: str = registry.DEFAULT
    """Name of the engine."""
    capabilities: registry.Capabilities = field(default_factory=lambda: registry.entry(registry.DEFAULT).capabilities)


def load(spec: WorkerSpec) -> Model:
    """Load the engine and the tokenizer. Blocks, for large models for minutes."""
    folder, version = spec.initial_weights or model_directory(spec), spec.initial_version
    if (Path(folder) / ADAPTER_FILE).is_file():  # adapters are loaded later, once the worker serves
        folder, version = model_directory(spec), 0
    if not (Path(folder) / "config.json").is_file():
        raise FileNotFoundError(f"{folder} has no config.json: pass the folder of a Hugging Face model")
    config = spec.plan.config
    deterministic = is_deterministic(config)
    if deterministic:
        repeat_bits()
    began = time.monotonic()
    engine = registry.load(
        config.engine.kind,
        registry.LoadRequest(
            folder,
            version,
            config.model.dtype,
            slots=config.engine.slots,
            max_len=config.engine.max_model_len,
            deterministic=deterministic,
            threads=spec.threads,
            devices=devices_of(spec),
            verify=config.weights.verify or "full",
            url=config.engine.url,
        ),
    )
    text = Text.load(model_directory(spec))
    text.warm()
    log.info("loaded %s in %.1f s", folder, time.monotonic() - began)
    kind = config.engine.kind or registry.DEFAULT
    return Model(engine, text, _merging(spec), kind, registry.entry(kind).capabilities)


def _merging(spec: WorkerSpec) -> Callable[[Path], Mapping[str, Any]] | None:
    config = spec.plan.config
    if not config.HasField("lora"):
        return None
    import torch

    from rollout_workers.inference.merging import Merging
    from rollout_workers.trainer.model.adapter import LoraConfig

    settings = LoraConfig.of(config)
    assert settings is not None
    return Merging(model_directory(spec), getattr(torch, config.model.dtype), settings, devices_of(spec)[0])
