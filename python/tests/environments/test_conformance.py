"""The environments of this project pass ``envtest``; broken ones fail it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from rollout.config.v1.run_config_pb2 import RunConfig
from rollout.environment import Environment, Observation, Refusal, Result, Task, Turn
from rollout.hosting.answers import EnvironmentBadResult
from rollout_testing import envtest
from rollout_workers.data.prompts import PromptReader, Text
from rollout_workers.environments import registry
from rollout_workers.environments.single_turn import SingleTurn
from rollout_workers.rewards.rewards import RewardGroup


def grpo() -> RunConfig:
    config = RunConfig()
    config.algorithm.grpo.SetInParent()
    return config


class Lengths:
    """A scorer: the length of each completion."""

    failures = retries = 0

    async def start(self) -> None: ...

    async def score(self, groups: Sequence[RewardGroup]) -> list[list[Result]]:
        return [[Result(float(len(sample.completion))) for sample in group.samples] for group in groups]

    async def close(self) -> None: ...


class Harness:
    """The rows of the addition example. Answers are digits."""

    stateful = False
    bad_row = b"[]"

    def __init__(self, text: Text, make: Any = None) -> None:
        self._text, self._make = text, make or self._single_turn

    def _single_turn(self) -> Environment:
        prompts = PromptReader(self._text, prompt_field="prompt", chat_template=False)
        return registry.build(registry.Context(grpo(), prompts, Lengths(), self._text))

    @asynccontextmanager
    async def start(self) -> AsyncIterator[Environment]:
        yield self._make()

    def row(self, number: int) -> dict[str, Any]:
        return {"prompt": f"{number}+1=", "answer": str(number + 1)}

    def answer(self, observation: Observation, turn: int) -> str:
        return "7" * (len(observation.text) + turn)

    def encode(self, text: str) -> list[int]:
        return self._text.encode([text])[0].tolist()


class Countdown:
    """Episodes with several turns and a state. Each observation is the number of remaining
    turns."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}

    async def reset(self, tasks: Sequence[Task]) -> list[Observation | Refusal]:
        return [self._begin(task) for task in tasks]

    def _begin(self, task: Task) -> Observation | Refusal:
        row = json.loads(task.row_json)
        if "prompt" not in row:
            return Refusal("ROW_INVALID", "the row has no `prompt`")
        for sample in task.samples:
            self.left[f"{task.key}/{sample}"] = 1 + task.row
        return Observation(np.array([1], np.int32), "start")

    async def step(self, turns: Sequence[Turn]) -> list[Observation | Result]:
        return [self._answer(f"{turn.task.key}/{turn.sample}", turn) for turn in turns]

    def _answer(self, key: str, turn: Turn) -> Observation | Result:
        self.left[key] -= 1
        return Observation(np.array([2], np.int32), str(self.left[key])) if self.left[key] else Result(float(turn.number))

    async def close(self, episodes: Sequence[tuple[str, int]]) -> None:
        for key, sample in episodes:
            self.left.pop(f"{key}/{sample}", None)

    def state_dict(self) -> Mapping[str, Any]:
        return {"left": self.left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.left = dict(state["left"])


class Said(Countdown):
    """Observes texts in place of tokens."""

    def _begin(self, task: Task) -> Observation | Refusal:
        first = super()._begin(task)
        return first if isinstance(first, Refusal) else Observation(text=first.text)

    def _answer(self, key: str, turn: Turn) -> Observation | Result:
        answer = super()._answer(key, turn)
        return answer if isinstance(answer, Result) else Observation(messages=({"role": "user", "content": answer.text},))


class Stateful(Harness):
    stateful = True

    def answer(self, observation: Observation, turn: int) -> str:
        return "7"


@pytest.mark.parametrize("case", envtest.applicable(Harness))  # type: ignore[arg-type]
async def test_single_turn(case: str, text: Text) -> None:
    await envtest.run(case, Harness(text))


@pytest.mark.parametrize("observes", [Countdown, Said])
@pytest.mark.parametrize("case", envtest.applicable(Stateful))  # type: ignore[arg-type]
async def test_an_environment_with_turns_and_state(case: str, observes: type[Countdown], text: Text) -> None:
    await envtest.run(case, Stateful(text, observes))


class Endless(Countdown):
    def _answer(self, key: str, turn: Turn) -> Observation | Result:
        return Observation(np.array([2], np.int32), "again")


class Silent(Countdown):
    """Fails without a reason."""

    def _answer(self, key: str, turn: Turn) -> Observation | Result:
        return Result(outcome="infra_failed")


class Short(Countdown):
    """Omits the last answer."""

    async def step(self, turns: Sequence[Turn]) -> list[Observation | Result]:
        return (await super().step(turns))[:-1]


class Lenient(Countdown):
    """Accepts any row."""

    def _begin(self, task: Task) -> Observation | Refusal:
        return Observation(np.array([1], np.int32), "start")


class Ordered(Countdown):
    """Its rewards depend on earlier calls."""

    calls = 0

    def _answer(self, key: str, turn: Turn) -> Observation | Result:
        self.calls += 1
        return Result(float(self.calls))


class Forgetful(Countdown):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.left = {"task-0/0": 9}


class Partial(Countdown):
    """Saves the number of turns that were left at the start."""

    def state_dict(self) -> Mapping[str, Any]:
        return {"left": dict.fromkeys(self.left, self.first)}

    def _begin(self, task: Task) -> Observation | Refusal:
        first = super()._begin(task)
        self.first = max(self.left.values(), default=0)
        return first


class Unbounded(Countdown):
    def state_dict(self) -> Mapping[str, Any]:
        return {**super().state_dict(), "memory": "x" * (17 << 20)}


class Unwritable(Countdown):
    def state_dict(self) -> Mapping[str, Any]:
        return {**super().state_dict(), "memory": object()}


class Strict(Countdown):
    """Rejects a second close."""

    async def close(self, episodes: Sequence[tuple[str, int]]) -> None:
        for key, sample in episodes:
            del self.left[f"{key}/{sample}"]


@pytest.mark.parametrize(
    ("broken", "case"),
    [
        (Endless, "episodes_end_with_a_result"),
        (Silent, "episodes_end_with_a_result"),
        (Short, "episodes_end_with_a_result"),
        (Lenient, "an_invalid_row_is_refused_alone"),
        (Ordered, "resets_and_results_follow_from_task_and_turns"),
        (Forgetful, "saved_episodes_continue"),
        (Partial, "saved_episodes_continue"),
        (Unbounded, "saved_episodes_continue"),
        (Unwritable, "saved_episodes_continue"),
        (Strict, "closing_is_idempotent"),
    ],
)
async def test_a_broken_environment_fails(broken: type[Countdown], case: str, text: Text) -> None:
    with pytest.raises((AssertionError, KeyError, EnvironmentBadResult)):
        await envtest.run(case, Stateful(text, broken))


def test_the_config_selects_the_environment(text: Text) -> None:
    prompts = PromptReader(text, prompt_field="prompt", chat_template=False)
    assert isinstance(registry.build(registry.Context(grpo(), prompts, None, text)), SingleTurn)
    unknown = grpo()
    unknown.environment.kind = "maze"
    with pytest.raises(registry.UnknownEnvironment, match="environment 'maze' is unknown"):
        registry.build(registry.Context(unknown, prompts, None, text))
