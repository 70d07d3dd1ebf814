"""The conformance suite that every environment passes.

@pytest.mark.parametrize("case", applicable(harness))
async def test_environment(case: str) -> None:
    await run(case, harness)
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, get_args

import numpy as np

from rollout.environment import ChildTurns, Environment, Observation, Outcome, Refusal, Result, StatefulEnvironment, Task, Turn
from rollout.hosting.answers import observation_of, same, state_of

MOST_TURNS = 32


class Harness(Protocol):
    """An environment under test."""

    def start(self) -> AbstractAsyncContextManager[Environment]:
        """The environment, shut down on exit."""
        ...

    def row(self, number: int) -> dict[str, Any]:
        """A valid row of its dataset; different numbers give different rows."""
        ...

    stateful: bool
    """Whether the environment implements ``StatefulEnvironment``."""

    bad_row: bytes
    """A row with which no episode can start."""

    def answer(self, observation: Observation, turn: int) -> str:
        """An answer of the policy. An episode must end within ``MOST_TURNS`` of them."""
        ...

    def encode(self, text: str) -> list[int]:
        """Tokens of an answer."""
        ...


Check = Callable[[Harness], Awaitable[None]]
CASES: dict[str, Check] = {}


def case(check: Check) -> Check:
    """Register a check."""
    CASES[check.__name__] = check
    return check


def applicable(harness: Harness) -> list[str]:
    """The cases that apply to an environment."""
    return [name for name in CASES if harness.stateful or name != "saved_episodes_continue"]


async def run(name: str, harness: Harness) -> None:
    """Run one case."""
    async with asyncio.timeout(60):
        await CASES[name](harness)


def task(harness: Harness, number: int, samples: tuple[int, ...] = (0, 1)) -> Task:
    """A group of a valid row."""
    return Task(f"task-{number}", json.dumps(harness.row(number)).encode(), samples, tuple(number + s for s in samples), number)


def turn(harness: Harness, of: Task, sample: int, number: int, first: Observation, last: Observation) -> Turn:
    """Answer an observation like the policy."""
    text = harness.answer(last, number)
    return Turn(of, sample, number, first.text, np.array(harness.encode(text), np.int32), text, False, first.token_ids, text)


async def begin(environment: Environment, tasks: list[Task]) -> list[Observation]:
    """Reset. Every task must start."""
    starts = await environment.reset(tasks)
    assert len(starts) == len(tasks), "one start per task"
    found: list[Observation] = []
    for start in starts:
        assert isinstance(start, Observation), f"a valid row was refused: {start}"
        check_observation(start)
        found.append(start)
    return found


async def play(environment: Environment, harness: Harness, tasks: list[Task]) -> dict[tuple[str, int], Result]:
    """Run every sample of the tasks until it ends. All turns of a round are passed in one call."""
    starts = await begin(environment, tasks)
    open_ = [(t, s, start, start) for t, start in zip(tasks, starts, strict=True) for s in t.samples]
    results: dict[tuple[str, int], Result] = {}
    for number in range(MOST_TURNS):
        turns = [turn(harness, t, s, number, first, last) for t, s, first, last in open_]
        answers = await environment.step(turns)
        assert len(answers) == len(turns), "one answer per turn"
        left: list[tuple[Task, int, Observation, Observation]] = []
        for (t, s, first, _), answer in zip(open_, answers, strict=True):
            if isinstance(answer, Result):
                check_result(answer)
                results[t.key, s] = answer
            else:
                assert not isinstance(answer, ChildTurns), "no policy for child sessions"
                check_observation(answer)
                left.append((t, s, first, answer))
        open_ = left
        if not open_:
            return results
    raise AssertionError(f"{len(open_)} episodes did not end within {MOST_TURNS} turns")


def check_observation(observation: Observation) -> None:
    """Check that the observation has messages, int32 tokens, or a text."""
    assert isinstance(observation, Observation)
    observation_of(observation, "the environment")


def check_result(result: Result) -> None:
    """Check that numbers are finite, and that exactly the failed episodes have a reason."""
    assert isinstance(result, Result) and result.outcome in get_args(Outcome)
    assert np.isfinite([result.reward, *result.metrics.values(), *result.token_rewards]).all(), "finite numbers"
    assert bool(result.reason) == (result.outcome in ("aborted", "infra_failed")), "a reason of each failure, and of nothing else"
    assert not result.steps, "step rewards are spread over the tokens"


@case
async def episodes_end_with_a_result(harness: Harness) -> None:
    async with harness.start() as environment:
        results = await play(environment, harness, [task(harness, 0), task(harness, 1, (0, 3))])
    assert set(results) == {("task-0", 0), ("task-0", 1), ("task-1", 0), ("task-1", 3)}
    assert all(result.outcome in ("completed", "truncated") for result in results.values())


@case
async def resets_and_results_follow_from_task_and_turns(harness: Harness) -> None:
    """Equal tasks and answers give equal observations and rewards, in any order and any number per
    call."""
    tasks = [task(harness, number) for number in range(3)]
    async with harness.start() as environment:
        together = await play(environment, harness, tasks)
    alone: dict[tuple[str, int], Result] = {}
    async with harness.start() as environment:
        for each in reversed(tasks):
            alone |= await play(environment, harness, [each])
    assert together == alone


@case
async def an_invalid_row_is_refused_alone(harness: Harness) -> None:
    async with harness.start() as environment:
        bad = Task("bad", harness.bad_row, (0,), (1,))
        refused, started = await environment.reset([bad, task(harness, 1)])
        assert isinstance(refused, Refusal) and refused.reason and refused.message and isinstance(started, Observation)


@case
async def calls_may_overlap(harness: Harness) -> None:
    async with harness.start() as environment:
        both = await asyncio.gather(*(play(environment, harness, [task(harness, number)]) for number in range(4)))
    assert [set(found) for found in both] == [{(f"task-{n}", 0), (f"task-{n}", 1)} for n in range(4)]


@case
async def closing_is_idempotent(harness: Harness) -> None:
    async with harness.start() as environment:
        await begin(environment, [task(harness, 0)])
        for _ in range(2):
            await environment.close([("task-0", 0), ("task-0", 1), ("unknown", 7)])
        assert await play(environment, harness, [task(harness, 0)])


@case
async def saved_episodes_continue(harness: Harness) -> None:
    """A restored copy answers each turn like the original: it is restored again after every turn,
    in place of what it had. The state is JSON of a bounded size. For environments with
    ``state_dict``."""
    wanted = task(harness, 2)
    async with harness.start() as environment, harness.start() as copy:
        assert isinstance(environment, StatefulEnvironment) and isinstance(copy, StatefulEnvironment)
        await begin(copy, [task(harness, 1)])
        [start] = await begin(environment, [wanted])
        last = start
        for number in range(MOST_TURNS):
            copy.load_state_dict(json.loads(state_of(environment.state_dict(), type(environment).__name__)))
            [first], [second] = [await each.step([turn(harness, wanted, 0, number, start, last)]) for each in (environment, copy)]
            if isinstance(first, Result) or isinstance(second, Result):
                assert first == second
                return
            assert isinstance(first, Observation) and isinstance(second, Observation), (
                "the suite has no policy for child sessions"
            )
            assert same(first, second), f"after turn {number}, the restored copy observes something else"
            last = first
