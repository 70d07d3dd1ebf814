"""What a learner does with a batch whose gradient it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollout_workers.trainer.types import LearnerError, TrainSample

POLICIES = ("stop", "skip", "restore")


@dataclass(frozen=True, slots=True)
class Refused:
    """A step whose gradient was refused."""

    step: int
    reason: str
    """``NON_FINITE_GRADIENT`` or ``EXPLODING_GRADIENT``."""
    message: str
    action: str
    """``stop``, ``skip`` or ``restore``."""
    batch: str
    """File that holds the batch; empty where none was wanted."""


@dataclass(slots=True)
class Refusals:
    """How refusals are met.

    ``stop``: the error is raised, the learner stands where it stood. ``skip``: the step counts, with the weights as they were.
    ``restore``: the step counts, with weights, moments and KL coefficient of the last state that was saved or loaded, else of the
    beginning. Either way the same batches give the same bits again.
    """

    action: str = "stop"
    folder: Path | None = None
    """Where batches are kept for inspection; None keeps none."""
    tell: Callable[[Refused], None] | None = None

    def __post_init__(self) -> None:
        if self.action not in POLICIES:
            raise ValueError(f"on_refused_gradient {self.action!r} is unknown; take one of {', '.join(POLICIES)}")

    def meet(self, step: int, samples: Sequence[TrainSample], error: LearnerError) -> Refused:
        """Keep the batch, and tell."""
        batch = ""
        if self.folder is not None:
            batch = str(keep(self.folder / f"step-{step:06d}.npz", samples, error))
        refused = Refused(step, error.reason, str(error), self.action, batch)
        if self.tell is not None:
            self.tell(refused)
        return refused


def keep(path: Path, samples: Sequence[TrainSample], error: LearnerError) -> Path:
    """Write a batch for inspection.

    ``numpy.load`` gives, for S samples of L tokens in all: ``token_ids`` int32 [L], ``loss_mask`` uint8 [L], ``logprobs`` float32
    [L], ``lengths``, ``prompt_lengths``, ``versions`` int64 [S], ``rewards`` float64 [S], ``groups`` text [S], ``error`` JSON;
    and where a sample has them ``token_rewards`` and ``teacher_logprobs``, float32 [L], NaN where another has none.
    """
    beside = {"token_rewards": [s.token_rewards for s in samples], "teacher_logprobs": [s.teacher_logprobs for s in samples]}
    lengths = [len(sample.token_ids) for sample in samples]
    further: dict[str, Any] = {
        name: np.concatenate([np.full(n, np.nan, np.float32) if of is None else of for of, n in zip(found, lengths, strict=True)])
        for name, found in beside.items()
        if any(of is not None for of in found)
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        path,
        token_ids=np.concatenate([sample.token_ids for sample in samples]),
        loss_mask=np.concatenate([sample.loss_mask for sample in samples]),
        logprobs=np.concatenate([sample.logprobs for sample in samples]),
        lengths=np.array(lengths),
        prompt_lengths=np.array([sample.prompt_length for sample in samples]),
        versions=np.array([sample.version for sample in samples]),
        rewards=np.array([sample.reward for sample in samples]),
        groups=np.array([sample.group_key for sample in samples]),
        error=np.array(json.dumps({"reason": error.reason, "message": str(error)})),
        **further,
    )
    return path
