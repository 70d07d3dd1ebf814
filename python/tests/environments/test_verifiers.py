"""The class for environments of verifiers, with a stand-in for the package, whose versions exclude
those of the tests. `make check-environments` has the real one."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from rollout.environment import Observation, Refusal, Result, Task, Turn
from rollout.environments.dialogs import ConversationUnsupported, Verifiers
from rollout.hosting.answers import EnvironmentBadResult
from rollout.hosting.episodes import EnvironmentFailed

Ask = Callable[[list[dict[str, Any]]], Awaitable[str]]
Play = Callable[[dict[str, Any], Ask], Awaitable[None]]


class Error(Exception):
    pass


class Client:
    def __init__(self, client: Any) -> None:
        self.client = client

    async def get_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None) -> Any:
        this = cast(Any, self)
        try:
            messages, more = await this.to_native_prompt(prompt)
            response = await this.get_native_response(messages, model, sampling_args, tools, **more)
            return await this.from_native_response(response)
        except Exception as error:
            raise Error from error


class Rubric:
    def __init__(self, *funcs: Callable[..., Any]) -> None:
        self.funcs = list(funcs)

    def _is_group_func(self, function: Any) -> bool:
        return "states" in inspect.signature(function).parameters

    async def score_rollout(self, state: dict[str, Any]) -> None:
        state["metrics"] = {}
        for function in self.funcs:
            try:
                state["metrics"][function.__name__] = await function(state)
            except Exception:
                state["metrics"][function.__name__] = 0.0
        state["reward"] = sum(state["metrics"].values())

    async def score_group(self, states: list[dict[str, Any]]) -> None:
        for function in self.funcs:
            for state, score in zip(states, await function(states=states), strict=True):
                state["reward"], state["metrics"] = score, {function.__name__: score}

    async def cleanup(self, state: dict[str, Any]) -> None:
        state["cleaned"] = True


class Environment:
    score_rollouts = True

    def __init__(self, play: Play, *funcs: Callable[..., Any], **settings: Any) -> None:
        self.play, self.rubric, self.settings = play, Rubric(*funcs), settings
        self.requires_group_rollouts = any(self.rubric._is_group_func(function) for function in funcs)
        self.cancelled = 0

    def get_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": [{"role": "user", "content": f"say {number}"}], "answer": str(number)} for number in range(3)]

    async def rollout(self, row: dict[str, Any], client: Any, model: str, sampling_args: Any) -> dict[str, Any]:
        state: dict[str, Any] = {**row, "timing": SimpleNamespace(scoring=SimpleNamespace()), "said": []}

        async def ask(messages: list[dict[str, Any]]) -> str:
            said = await client.get_response(messages, model, self.settings)
            state["said"].append(said.content)
            return said.content

        try:
            await self.play(state, ask)
        except Error as error:
            state["error"] = error
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return state


async def right(state: dict[str, Any]) -> float:
    return float(state["said"][-1] == state["answer"])


def broken(state: dict[str, Any]) -> float:
    raise KeyError("score")


def nan(state: dict[str, Any]) -> float:
    return float("nan")


def longest(states: list[dict[str, Any]]) -> list[float]:
    return [float(len(state["said"][-1]) == max(len(each["said"][-1]) for each in states)) for state in states]


async def once(state: dict[str, Any], ask: Ask) -> None:
    await ask(state["prompt"])


async def twice(state: dict[str, Any], ask: Ask) -> None:
    said = await ask(state["prompt"])
    again = {"role": "user", "content": "again"}
    await ask([*state["prompt"], {"role": "assistant", "content": said}, again])


async def rewriting(state: dict[str, Any], ask: Ask) -> None:
    said = await ask(state["prompt"])
    await ask([{"role": "user", "content": f"you said {said}"}])


async def parallel(state: dict[str, Any], ask: Ask) -> None:
    await asyncio.gather(ask(state["prompt"]), ask(state["prompt"]))


async def raising(state: dict[str, Any], ask: Ask) -> None:
    await ask(state["prompt"])
    raise ZeroDivisionError("division by zero")


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Verifiers]:
    """Build the class for an environment of the stand-in."""

    def build(play: Play, *funcs: Callable[..., Any], **settings: Any) -> Verifiers:
        package: Any = ModuleType("verifiers")
        package.Environment, package.ToolError = Environment, type("ToolError", (Error,), {})
        package.load_environment = lambda name: Environment(play, *funcs, **settings)
        types: Any = ModuleType("verifiers.types")
        types.ToolCall = types.ResponseMessage = SimpleNamespace
        types.Response = lambda message, **_: message
        clients: Any = ModuleType("verifiers.clients")
        clients.Client = Client
        for module in (package, types, clients):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        return Verifiers(id="game")

    return build


TASK = Task("t", b'{"index": 2}', (0, 1), (0, 1))


def turn(sample: int, text: str, number: int = 0) -> Turn:
    return Turn(TASK, sample, number, "", np.zeros(1, np.int32), text, False, content=text)


async def test_each_sample_has_a_rollout_that_waits_for_its_turns(make: Callable[..., Verifiers]) -> None:
    game = make(twice, right)
    (first,) = await game.reset([TASK])
    assert isinstance(first, Observation) and first.messages == ({"role": "user", "content": "say 2"},)
    answers = await game.step([turn(1, "1"), turn(0, "2")])
    assert [answer.messages for answer in answers if isinstance(answer, Observation)] == [
        ({"role": "user", "content": "again"},)
    ] * 2
    assert await game.step([turn(0, "1", 1), turn(1, "2", 1)]) == [
        Result(reward=0.0, metrics={"right": 0.0}),
        Result(reward=1.0, metrics={"right": 1.0}),
    ]
    with pytest.raises(EnvironmentFailed, match="has no open episode"):
        await game.step([turn(0, "2", 2)])


@pytest.mark.parametrize(
    ("play", "functions", "error", "message"),
    [
        (
            rewriting,
            [right],
            ConversationUnsupported,
            "`game` rewrote message 1 before turn 2: its turns do not continue each other",
        ),
        (raising, [right], EnvironmentFailed, "`game` raised ZeroDivisionError: division by zero"),
        (once, [right, broken], EnvironmentFailed, "`broken` of the rubric of `game` raised KeyError: 'score'"),
        (once, [right, nan], EnvironmentBadResult, "`nan` of the rubric of `game` returned nan"),
    ],
)
async def test_a_turn_that_cannot_be_continued_or_scored_is_a_failure(
    make: Callable[..., Verifiers], play: Play, functions: list[Callable[..., Any]], error: type[Exception], message: str
) -> None:
    game = make(play, *functions)
    await game.reset([TASK])
    with pytest.raises(error) as raised:
        await game.step([turn(0, "2")])
    assert cast(Any, raised.value).message == message


async def test_sampling_arguments_of_the_environment_are_refused(make: Callable[..., Verifiers]) -> None:
    with pytest.raises(ConversationUnsupported, match="sets its own sampling arguments: temperature"):
        await make(once, right, temperature=2).reset([TASK])


async def test_a_second_request_at_the_same_time_is_refused(make: Callable[..., Verifiers]) -> None:
    game = make(parallel, right)
    await game.reset([TASK])
    with pytest.raises(ConversationUnsupported, match="two turns at the same time"):
        await game.step([turn(0, "2")])


async def test_rewards_of_a_group_wait_for_its_open_samples_only(make: Callable[..., Verifiers]) -> None:
    game = make(once, longest)
    assert game.waits_for_siblings
    await game.reset([Task("t", TASK.row_json, (0, 1, 2), (0, 1, 2))])
    waiting = [asyncio.create_task(game.step([turn(sample, "2" * (sample + 1))])) for sample in (0, 1)]
    done, _ = await asyncio.wait(waiting, timeout=0.05)
    assert not done, "sample 2 has not answered"
    await game.close([("t", 2)])
    async with asyncio.timeout(10):
        results = [(await task)[0] for task in waiting]
    assert [cast(Result, result).reward for result in results] == [0.0, 1.0]
    assert cast(Any, game)._env.cancelled == 1


async def test_a_row_selects_an_example(make: Callable[..., Verifiers]) -> None:
    game = make(once, right)
    rows = [b'{"index": 3}', b'{"index": true}', b"{}", b'{"index": 0, "split": "test"}']
    refusals = await game.reset([Task(str(at), row, (0,), (0,)) for at, row in enumerate(rows)])
    assert [cast(Refusal, refusal).message for refusal in refusals] == [
        "`index` is 3, not the number of an example from 0 to 2",
        "`index` is True, not the number of an example from 0 to 2",
        "`index` is None, not the number of an example from 0 to 2",
        '`split` is \'test\', not "train" or "eval"',
    ]
