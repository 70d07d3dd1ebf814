"""Merges adapters into their base model, for ``rollout export weights`` and
``rollout infer batch``.

The spec is a JSON object::

    {"config": RunConfig, "base": "/scratch/base", "adapter": "/scratch/adapter", "to": "/scratch/merged", "step": 30}

Standard output gets one JSON object: ``{"digest": "blake3-.."}`` of the merged weights, or
``{"reason": .., "message": .., "fix": ..}``.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from google.protobuf import json_format

from rollout.algorithm import name_of
from rollout.config.v1.run_config_pb2 import RunConfig
from rollout.errors import RolloutError
from rollout_workers.algorithms import build_algorithm
from rollout_workers.learner.settings import algorithm_settings
from rollout_workers.trainer import LearnerError, LoraConfig
from rollout_workers.trainer.model.policy import Policy
from rollout_workers.trainer.model.scorer import Scorer
from rollout_workers.weights import WeightsManifest, write_weights
from rollout_workers.weights.store import WeightsUnreadable

log = logging.getLogger(__name__)

EXIT_DATA = 65


def merge(path: str) -> int:
    """Merge what the spec at ``path`` names. Returns the exit code."""
    try:
        spec: dict[str, Any] = json.loads(Path(path).read_text())
        config = json_format.ParseDict(spec["config"], RunConfig(), ignore_unknown_fields=True)
        written = merge_folders(config, Path(spec["base"]), Path(spec["adapter"]), Path(spec["to"]), int(spec["step"]))
    except (RolloutError, LearnerError, WeightsUnreadable, OSError, ValueError) as error:
        log.error("%s", error)
        message, fix = getattr(error, "message", str(error)), getattr(error, "fix", "")
        print(json.dumps({"reason": getattr(error, "reason", "INTERNAL"), "message": message, "fix": fix}), flush=True)
        return EXIT_DATA
    print(json.dumps({"digest": written.digest}), flush=True)
    return 0


def merge_folders(config: RunConfig, base: Path, adapter: Path, to: Path, step: int) -> WeightsManifest:
    """Write the weights of ``step`` with the code that the learner uses. base: the folder of the
    run's model. adapter: of a state. Raises ``WeightsUnreadable``, ``WeightsIncomplete``,
    ``BadSettings``, ``OSError``."""
    algorithm = build_algorithm(name_of(config), algorithm_settings(config))
    kind = Scorer if algorithm.needs.score_head else Policy
    policy = kind.prepare(base, dtype=getattr(torch, config.model.dtype), lora=LoraConfig.of(config))
    if policy.adapter is None:
        raise WeightsUnreadable(f"the run of {adapter} has no `lora` table, so its weights have no adapters")
    policy.adapter.read(adapter)
    with torch.no_grad():
        return write_weights(to, policy.named_weights(), config_source_dir=policy.config_folder(base), version=step)
