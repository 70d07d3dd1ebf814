"""The inputs, results, and errors of a reward function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.errors import RolloutError


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion to be scored."""

    prompt: str  # as the model read it, special tokens left out
    completion: str  # what the model said, special tokens and stop text left out
    row: Mapping[str, Any] = field(default_factory=lambda: {})  # the dataset's row that the prompt came from
    token_ids: Sequence[int] = ()  # tokens of the completion, its end among them


@dataclass(frozen=True, slots=True)
class Step:
    """What a part of a completion is worth: its characters ``start`` to ``end``, the latter left
    out."""

    start: int
    end: int
    reward: float


@dataclass(frozen=True, slots=True)
class Score:
    """What a sample is worth; every number is finite."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=lambda: {})
    token_rewards: Sequence[float] = ()  # one a token of the completion, or none
    steps: Sequence[Step] = ()  # ascending, none over another


RewardFunction = Callable[[Sequence[Sample]], Any]


class RewardError(RolloutError):
    """Base of everything that can go wrong with a reward."""


class RewardImportError(RewardError):
    """The file can't be read or imported, or has no such function."""

    reason = "REWARD_IMPORT"


class RewardFailed(RewardError):
    """The function raised; ``__cause__`` is what it raised."""

    reason = "REWARD_RAISED"


class RewardShapeError(RewardError):
    """The function returned something that is not one finite number a sample."""

    reason = "REWARD_BAD_RESULT"


class RewardTimeout(RewardError):
    """The function did not return within its time limit."""

    reason = "REWARD_TIMEOUT"
