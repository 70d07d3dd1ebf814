"""Selects samples of a step to store for inspection, with their rewards and advantages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from rollout.algorithm import name_of, samples
from rollout.config.v1.run_config_pb2 import RunConfig
from rollout.learner.v1 import learner_pb2 as pb
from rollout.trajectory.v1.trajectory_pb2 import OUTCOME_COMPLETED, OUTCOME_TRUNCATED, Turn
from rollout_workers.learner.payload import PARTS
from rollout_workers.trainer.types import TrainSample

MOST_CHARACTERS = 4000  # per text
_ALL_CHARACTERS = 100_000  # per step: its texts are in one event
MOST_TURNS = 128  # per sample
_ALL_TURNS = 1024  # per step
_ALL_TOKENS = 16_384  # per step


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
        limits = _Limits(
            characters=min(MOST_CHARACTERS, _ALL_CHARACTERS // (2 * self.per_step)),
            turns=min(MOST_TURNS, _ALL_TURNS // self.per_step),
            tokens=_ALL_TOKENS // self.per_step,
        )
        return [_completion(sample, advantages.get((sample.group_key, sample.sample)), limits) for sample in chosen]


def keep_of(config: RunConfig) -> Keep | None:
    """The selection of a run; None if its algorithm does not sample."""
    if not samples(name_of(config)):
        return None
    return Keep(config.completions.per_step, config.completions.every_steps or 1)


@dataclass(frozen=True, slots=True)
class _Limits:
    """What is kept of a sample. characters: of each of its texts, and of its turns together.
    tokens: of the completion."""

    characters: int
    turns: int
    tokens: int


def _completion(sample: TrainSample, advantage: float | None, limits: _Limits) -> pb.Completion:
    epoch, index = sample.group_key.split("/")
    kept = slice(sample.prompt_length, sample.prompt_length + limits.tokens)
    return pb.Completion(
        epoch=int(epoch),
        index=int(index),
        sample=sample.sample // PARTS,
        part=sample.part,
        prompt=_tail(sample.prompt, limits.characters),
        completion=_head(sample.completion, limits.characters),
        reward=sample.reward,
        metrics=sample.metrics,
        advantage=advantage,
        prompt_tokens=sample.prompt_length,
        tokens=len(sample.token_ids) - sample.prompt_length,
        truncated=sample.truncated,
        outcome=OUTCOME_TRUNCATED if sample.truncated else OUTCOME_COMPLETED,
        turns=_turns(sample.turns, limits),
        version_spans=sample.spans,
        token_ids=sample.token_ids[kept].tobytes(),
        logprobs=sample.logprobs[kept].tobytes(),
        loss_mask=sample.loss_mask[kept].tobytes(),
        parent=sample.parent,
    )


def _turns(turns: Sequence[Turn], limits: _Limits) -> Iterator[Turn]:
    """The first turns. They share the characters, so that an early long one is truncated as much as
    a late one."""
    kept = turns[: limits.turns]
    most = max(80, 2 * limits.characters // max(1, len(kept)))
    for turn in kept:
        short = Turn(text=_head(turn.text, most), messages=[_message(message, most) for message in turn.messages])
        short.sampled, short.start, short.end, short.reward = turn.sampled, turn.start, turn.end, turn.reward
        short.metrics.update(turn.metrics)
        yield short


def _message(message: str, most: int) -> str:
    """A message, which is JSON, with its long texts truncated."""
    if len(message) <= most:
        return message
    return json.dumps(_shortened(json.loads(message), most // 2), ensure_ascii=False)


def _shortened(value: Any, most: int) -> Any:
    if isinstance(value, str):
        return _head(value, most)
    if isinstance(value, list):
        return [_shortened(each, most) for each in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {name: _shortened(each, most) for name, each in cast("dict[str, Any]", value).items()}
    return value


def _head(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _tail(text: str, most: int) -> str:
    """The end of a prompt, which matters most."""
    return text if len(text) <= most else "…" + text[1 - most :]
