"""The handling of batches whose gradient is refused."""

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
    """``stop``, ``skip``, or ``restore``."""
    batch: str
    """The file with the batch; empty if it was not saved."""


@dataclass(slots=True)
class Refusals:
    """The policy for refused gradients.

    ``stop``: raise the error; nothing changes. ``skip``: count the step and keep the weights.
    ``restore``: count the step and go back to the weights, moments, and KL coefficient of the last
    state that was saved or loaded (or of the start). In each case the same batches give the same
    bits.
    """

    action: str = "stop"
    folder: Path | None = None
    """Where batches are saved for inspection; None: they are not."""
    notify: Callable[[Refused], None] | None = None
    """Called for each refused step."""

    def __post_init__(self) -> None:
        if self.action not in POLICIES:
            raise ValueError(f"on_refused_gradient {self.action!r} is unknown; use one of {', '.join(POLICIES)}")

    def record(self, step: int, samples: Sequence[TrainSample], error: LearnerError) -> Refused:
        """Save the batch and notify."""
        batch = ""
        if self.folder is not None:
            batch = str(save_batch(self.folder / f"step-{step:06d}.npz", samples, error))
        refused = Refused(step, error.reason, str(error), self.action, batch)
        if self.notify is not None:
            self.notify(refused)
        return refused


def save_batch(path: Path, samples: Sequence[TrainSample], error: LearnerError) -> Path:
    """Write a batch for inspection.

    For S samples with L tokens in total, ``numpy.load`` returns ``token_ids`` int32 [L],
    ``loss_mask`` uint8 [L], ``logprobs`` float32 [L], ``lengths``, ``prompt_lengths``, ``versions``
    int64 [S], ``rewards`` float64 [S], ``groups`` text [S], and ``error`` JSON. If any sample has
    them, also ``token_rewards`` and ``teacher_logprobs``, float32 [L], NaN for other samples.
    """
    optional = {"token_rewards": [s.token_rewards for s in samples], "teacher_logprobs": [s.teacher_logprobs for s in samples]}
    lengths = [len(sample.token_ids) for sample in samples]
    further: dict[str, Any] = {
        name: np.concatenate([np.full(n, np.nan, np.float32) if of is None else of for of, n in zip(found, lengths, strict=True)])
        for name, found in optional.items()
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
