"""The inputs, results, and errors of a reward function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.errors import RolloutError


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion to score."""

    prompt: str  # as the model read it, without special tokens
    completion: str  # as the model wrote it, without special tokens and stop text
    row: Mapping[str, Any] = field(default_factory=lambda: {})  # the dataset's row of the prompt
    token_ids: Sequence[int] = ()  # token ids of the completion, including the end token


@dataclass(frozen=True, slots=True)
class Step:
    """The reward of a part of a completion: the characters from ``start`` up to but not including
    ``end``."""

    start: int
    end: int
    reward: float


@dataclass(frozen=True, slots=True)
class Score:
    """The rewards of a sample. Every number is finite."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=lambda: {})
    token_rewards: Sequence[float] = ()  # one per token of the completion, or none
    steps: Sequence[Step] = ()  # in ascending order, without overlap


RewardFunction = Callable[[Sequence[Sample]], Any]


class RewardError(RolloutError):
    """Base class of the errors of rewards."""


class RewardImportError(RewardError):
    """The file can't be read or imported, or has no such function."""

    reason = "REWARD_IMPORT"


class RewardFailed(RewardError):
    """The function raised an exception, which is ``__cause__``."""

    reason = "REWARD_RAISED"


class RewardShapeError(RewardError):
    """The function did not return one finite number for each sample."""

    reason = "REWARD_BAD_RESULT"


class RewardTimeout(RewardError):
    """The function did not return within its time limit."""

    reason = "REWARD_TIMEOUT"
