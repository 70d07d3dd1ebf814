"""The protocol of environments: batched and asynchronous. Imports no torch.

    reset(tasks) -> per task, what its episodes begin with
    step(turns)  -> per turn, an Observation (the episode continues) or a Result (it has ended)
    close(..)    -> these episodes are over or abandoned

A *task* is one prompt group: its samples share the first observation, so an engine runs the prompt
once. From the second turn on, every sample is an episode of its own. A single-turn environment
answers the first ``step`` with Results; one with tools answers with Observations that hold the
tool's output. ``rollout_testing.envtest`` checks an implementation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rollout.plugin import Step

Outcome = Literal["completed", "truncated", "aborted", "infra_failed"]


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt group, or the missing part of it.

    key: unique among the open tasks. row_json: the dataset's row. samples: numbers of the requested
    samples of the group, with the seed of each.
    """

    key: str
    row_json: bytes
    samples: tuple[int, ...]
    seeds: tuple[int, ...]
    row: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """Tokens (int32[N]) that are appended to the episode's context and not trained on. text: the
    same as text, for people and rewards."""

    token_ids: NDArray[np.int32]
    text: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One answer of the policy. sample: number in the task. number: of the turn, from 0. text:
    without special tokens and stop text.

    prompt, prompt_ids: text and tokens (int32[N]) of the first observation. truncated: whether the
    answer ended at the token limit.
    """

    task: Task
    sample: int
    number: int
    prompt: str
    token_ids: NDArray[np.int32]
    text: str
    truncated: bool
    prompt_ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))


@dataclass(frozen=True, slots=True)
class Result:
    """The end of an episode. reward, metrics: only for completed and truncated episodes. reason:
    for the other outcomes.

    token_rewards, teacher_logprobs: one per token of the completion, or empty. steps: rewards of
    parts of the completion, which become ``token_rewards`` before an environment returns the result
    (``process_reward.spread``).
    """

    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    outcome: Outcome = "completed"
    reason: str = ""
    token_rewards: tuple[float, ...] = ()
    teacher_logprobs: tuple[float, ...] = ()
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """A task that can't start because its row is invalid. All of its samples end as INFRA_FAILED
    with this reason."""

    reason: str
    message: str


class Environment(Protocol):
    """Runs the episodes of tasks. Calls may overlap. An exception fails only the turns or tasks of
    that call."""

    async def reset(self, tasks: Sequence[Task]) -> Sequence[Observation | Refusal]:
        """The first observation of each task, in order."""
        ...

    async def step(self, turns: Sequence[Turn]) -> Sequence[Observation | Result]:
        """The observation or the result after each turn, in order."""
        ...

    async def close(self, episodes: Sequence[tuple[str, int]]) -> None:
        """Release these episodes (task key, sample). Idempotent; unknown episodes are ignored."""
        ...


@runtime_checkable
class StatefulEnvironment(Protocol):
    """An environment whose open episodes can be saved and restored."""

    def state_dict(self) -> Mapping[str, Any]:
        """The open episodes as plain data. Not called during other calls of the environment."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the open episodes by saved ones."""
        ...


def failed(reason: str) -> Result:
    """An infrastructure failure. Never a reward of 0."""
    return Result(outcome="infra_failed", reason=reason)


def reason_of(error: BaseException, otherwise: str) -> str:
    """The machine-readable reason of an exception."""
    reason: Any = getattr(error, "reason", None)
    return reason if isinstance(reason, str) and reason else otherwise
