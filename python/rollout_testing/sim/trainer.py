"""A trainer without a model. A step hashes every byte of its samples into the weights."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout_testing.sim import policy
from rollout_testing.sim.hang import hangs
from rollout_testing.sim.journal import Journal
from rollout_workers.trainer.types import BadBatch, StateUnreadable, StepOutOfTurn, StepResult, TrainSample

_STATE = "state.json"
_OPTIMIZER = "optimizer.bin"
BYTES_VARIABLE = "ROLLOUT_SIM_STATE_BYTES"
"""Size of the file of a state that stands for an optimizer, other bytes in each step; none where it
is not set."""
INEXACT_VARIABLE = "ROLLOUT_SIM_INEXACT"
"""If it is set, every process computes other bits, like a trainer whose kernels are not
deterministic."""


class SimTrainer:
    """The part of ``Trainer`` that the learner calls. The config is ``Settings``."""

    journal: Journal | None = None  # of the process
    adapts = False

    def __init__(self, model_dir: str | os.PathLike[str], config: Any) -> None:
        self.model_dir, self.config = Path(model_dir), config
        self.config_folder = self.model_dir
        self.step = 0
        self.words = policy.read(model_dir)
        self._noise = [os.urandom(8)] if os.environ.get(INEXACT_VARIABLE) else []

    def train_step(
        self, samples: Sequence[TrainSample], step: int, on_progress: Callable[[int, int], None] | None = None
    ) -> StepResult:
        if step != self.step + 1:
            raise StepOutOfTurn(f"step {step} was requested, but the learner is at step {self.step}")
        if not samples:
            raise BadBatch("the batch has no samples")
        if hangs("trainer"):
            threading.Event().wait()
        began = time.perf_counter()
        ordered = sorted(samples, key=lambda sample: (sample.group_key, sample.sample))
        self.words = policy.learn(self.words, [_bytes(sample, self.config.off_policy) for sample in ordered] + self._noise, step)
        self.step = step
        if self.journal is not None:
            names = [f"{_name(sample.group_key)}/{sample.sample >> 12}" for sample in ordered]
            self.journal.write(step=step, digest=policy.digest(self.words).root, samples=names)
        if on_progress is not None:
            on_progress(1, 1)
        rewards = [sample.reward for sample in ordered]
        tokens = sum(int(np.count_nonzero(sample.loss_mask)) for sample in ordered)
        metrics = {
            "loss": float(self.words[0] >> np.uint64(40)) / 2**24,
            "reward/mean": float(np.mean(rewards)),
            "tokens": float(tokens),
        }
        return StepResult(step, metrics | {"time/step": time.perf_counter() - began})

    def named_weights(self) -> Iterator[tuple[str, policy.Words]]:
        yield "words", self.words

    def weights_digest(self) -> policy.WeightsDigest:
        return policy.digest(self.words)

    def write_weights(
        self, directory: str | os.PathLike[str], *, fsync: bool = True, staging: Path | None = None
    ) -> policy.WeightsManifest:
        return policy.write(Path(directory), self.words, self.step, self.model_dir, fsync)

    def save_state(self, directory: str | os.PathLike[str]) -> list[Path]:
        root = Path(directory)
        root.mkdir(parents=True, exist_ok=True)
        (root / _STATE).unlink(missing_ok=True)
        manifest = policy.write(root / "weights", self.words, self.step, self.model_dir, fsync=True)
        if size := int(os.environ.get(BYTES_VARIABLE, "0")):
            (root / _OPTIMIZER).write_bytes(self.step.to_bytes(8, "little") * (size // 8))
        (root / _STATE).write_text(json.dumps({"step": self.step, "weights_digest": manifest.digest}))
        policy.sync(root / _STATE)
        policy.sync(root)
        return sorted(path.relative_to(root) for path in root.rglob("*") if path.is_file())

    def begin_save(self, directory: str | os.PathLike[str]) -> Saved:
        return Saved(self.save_state(directory))

    def load_state(self, directory: str | os.PathLike[str], step: int | None = None) -> None:
        root = Path(directory)
        try:
            state = json.loads((root / _STATE).read_text())
            words = policy.read(root / "weights")
        except (OSError, ValueError) as error:
            raise StateUnreadable(f"{root}: {error}") from error
        if policy.digest(words).root != state["weights_digest"]:
            raise StateUnreadable(f"{root} has weights with another digest than its state records")
        self.words, self.step = words, int(state["step"]) if step is None else step


class Saved:
    """Replaces ``rollout_workers.trainer.state.Saving``: the state is written already."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files

    def result(self) -> list[Path]:
        return self._files


def _bytes(sample: TrainSample, off_policy: bool) -> bytes:
    """The bytes of a sample that affect a step. Logprobs of the engine only count off policy, like
    in the real trainer."""
    parts = [
        sample.group_key.encode(),
        sample.sample.to_bytes(8, "little"),
        sample.token_ids.tobytes(),
        sample.loss_mask.tobytes(),
    ]
    if off_policy:
        parts.append(sample.logprobs.tobytes())
    return b"\0".join([*parts, np.float64(sample.reward).tobytes()])


def _name(group_key: str) -> str:
    epoch, index = group_key.split("/")
    return f"{int(epoch)}/{int(index)}"
