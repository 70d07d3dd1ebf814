"""Selects samples of a step to store for inspection, with their rewards and advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollout.algorithm import name_of, samples
from rollout.config.v1.run_config_pb2 import RunConfig
from rollout.learner.v1 import learner_pb2 as pb
from rollout_workers.learner.payload import PARTS
from rollout_workers.trainer.types import TrainSample

MOST_CHARACTERS = 4000  # per text
_ALL_CHARACTERS = 100_000  # per step: its texts are in one event


@dataclass(frozen=True, slots=True)
class Keep:
    """Selects the first ``per_step`` samples of step 1 and of each ``every_steps`` steps after
    it."""

    per_step: int
    every_steps: int

    def of(self, step: int, samples: Sequence[TrainSample], advantages: Mapping[tuple[str, int], float]) -> list[pb.Completion]:
        """The selected samples of ``step``, ordered by group. advantages: by (group_key,
        sample)."""
        if not self.per_step or (step - 1) % self.every_steps:
            return []
        chosen = sorted(samples, key=lambda s: (s.group_key, s.sample))[: self.per_step]
        most = min(MOST_CHARACTERS, _ALL_CHARACTERS // (2 * self.per_step))
        return [_completion(sample, advantages.get((sample.group_key, sample.sample)), most) for sample in chosen]


def keep_of(config: RunConfig) -> Keep | None:
    """The selection of a run; None if its algorithm does not sample."""
    if not samples(name_of(config)):
        return None
    return Keep(config.completions.per_step, config.completions.every_steps or 1)


def _completion(sample: TrainSample, advantage: float | None, most: int) -> pb.Completion:
    epoch, index = sample.group_key.split("/")
    return pb.Completion(
        epoch=int(epoch),
        index=int(index),
        sample=sample.sample // PARTS,
        prompt=_tail(sample.prompt, most),
        completion=_head(sample.completion, most),
        reward=sample.reward,
        advantage=advantage,
        tokens=len(sample.token_ids) - sample.prompt_length,
        truncated=sample.truncated,
    )


def _head(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _tail(text: str, most: int) -> str:
    """The end of a prompt, which matters most."""
    return text if len(text) <= most else "…" + text[1 - most :]
