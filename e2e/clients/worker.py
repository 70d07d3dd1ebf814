"""``worker.py inference|learner ...``: a worker whose learner makes a step by replacing the output
projection (see `policy.head`), at most once in COUNTING_SECONDS."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import policy
import torch

from rollout_workers.__main__ import main
from rollout_workers.trainer.trainer import Trainer
from rollout_workers.trainer.types import StepResult

INTERVAL = float(os.environ.get("COUNTING_SECONDS", "0.1"))
last = 0.0


@torch.no_grad()
def count(self: Trainer, samples: Sequence[Any], step: int, on_progress: Callable[[int, int], None] | None = None) -> StepResult:
    global last
    time.sleep(max(0.0, last + INTERVAL - time.monotonic()))
    last = time.monotonic()
    weights = dict(self.named_weights())
    weights["lm_head.weight"].copy_(policy.head(weights["model.embed_tokens.weight"].clone(), step))
    self.step = step
    return StepResult(step, {"loss": 0.0, "reward/mean": 0.0, "tokens": float(len(samples))})


Trainer.train_step = count
main()
