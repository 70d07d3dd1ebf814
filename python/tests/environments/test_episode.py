"""Episodes with one and several turns, and failures of environments and engines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from blake3 import blake3

from rollout.environment import Observation, Refusal, Result, Task, Turn
from rollout_testing.engine import ScriptedEngine
from rollout_workers.data.prompts import Text
from rollout_workers.engines.base import GroupRequest, SampleOutput, SamplingParams, VersionSpan
from rollout_workers.environments.episode import Episode, EpisodeRunner, FinishedGroup, sample_seed, turn_seed

PARAMS = SamplingParams(max_tokens=8)


class Counting:
    """An environment with ``turns`` turns. Each answer except the last is followed by the
    observation ``;``."""

    def __init__(self, text: Text, turns: int) -> None:
        self._text, self._turns = text, turns
        self.steps: list[list[Turn]] = []
        self.closed: list[tuple[str, int]] = []

    async def reset(self, tasks: Sequence[Task]) -> list[Observation | Refusal]:
        return [
            Refusal("PROMPT_INVALID", "no") if task.row_json == b"bad" else self._observe(task.row_json.decode())
            for task in tasks
        ]

    async def step(self, turns: Sequence[Turn]) -> list[Observation | Result]:
        self.steps.append(list(turns))
        if any(turn.text == "0" for turn in turns):
            raise ZeroDivisionError
        return [
            Result(float(turn.number), {"turns": turn.number + 1.0}) if turn.number + 1 == self._turns else self._observe(";")
            for turn in turns
        ]

    async def close(self, episodes: Sequence[tuple[str, int]]) -> None:
        self.closed.extend(episodes)

    def _observe(self, words: str) -> Observation:
        return Observation(self._text.encode([words])[0], words)


def task(key: str, prompt: str, samples: tuple[int, ...] = (0, 1)) -> Task:
    return Task(key, prompt.encode(), samples, tuple(100 + sample for sample in samples))


async def run(engine: ScriptedEngine, environment: Counting, text: Text, tasks: list[Task]) -> dict[str, FinishedGroup]:
    runner = EpisodeRunner(engine, environment, text, PARAMS)
    return {group.task.key: group async for groups in runner.run(tasks) for group in groups}


def answering(text: Text, answers: dict[str, str]) -> ScriptedEngine:
    """An engine whose answers depend on the text of the context."""

    def answer(request: GroupRequest, sample: int) -> list[int]:
        [context] = text.decode([np.array(request.prompt_ids)])
        return text.encode([answers.get(context, "7")])[0].tolist()

    return ScriptedEngine(answer)


async def test_an_episode_of_one_turn(text: Text) -> None:
    environment = Counting(text, 1)
    engine = answering(text, {"1+1=": "2"})
    finished = await run(engine, environment, text, [task("a", "1+1="), task("b", "2+2=", (1, 3))])
    assert [episode.texts for episode in finished["a"].episodes] == [["2"], ["2"]]
    assert [episode.sample for episode in finished["b"].episodes] == [1, 3]
    assert [request.seeds for request in engine.requests] == [(100, 101), (101, 103)]
    assert finished["a"].episodes[0].result == Result(0.0, {"turns": 1.0})
    assert len(environment.steps) == 1, "what ended together is stepped together"
    assert environment.closed == []


async def test_several_turns_extend_one_context(text: Text) -> None:
    environment = Counting(text, 3)
    engine = answering(text, {"1+1=": "2", "1+1=2;": "33", "1+1=2;33;": "4"})
    finished = await run(engine, environment, text, [task("a", "1+1=", (0, 5))])
    episode = finished["a"].episodes[1]
    assert text.decode([episode.context()]) == ["1+1=2;33;4"]
    assert episode.texts == ["2", ";", "33", ";", "4"]
    assert episode.result == Result(2.0, {"turns": 3.0})
    later = engine.requests[1:]
    assert {request.seeds[0] for request in later} == {turn_seed(s, t) for s in (100, 105) for t in (1, 2)}
    assert episode.spans() == [VersionSpan(0, 0, 6)]


def test_version_spans_cover_observations() -> None:
    def sampled(*spans: tuple[int, int, int]) -> SampleOutput:
        count = spans[-1][2]
        zeros = np.zeros(count, np.float32)
        made = tuple(VersionSpan(*span) for span in spans)
        return SampleOutput("r", 0, np.zeros(count, np.int32), zeros, zeros, made, "stop")

    nothing = Observation(np.zeros(0, np.int32))
    episode = Episode(task("a", ""), 0, nothing)
    episode.parts = [sampled((3, 0, 2), (4, 2, 5)), Observation(np.zeros(2, np.int32)), sampled((4, 0, 1), (5, 1, 2))]
    assert episode.spans() == [VersionSpan(3, 0, 2), VersionSpan(4, 2, 8), VersionSpan(5, 8, 9)]


async def test_a_refused_task_fails_with_its_reason(text: Text) -> None:
    finished = await run(answering(text, {}), Counting(text, 1), text, [task("a", "bad"), task("b", "1+1=")])
    assert [(e.result.outcome, e.result.reason) for e in finished["a"].episodes if e.result] == [
        ("infra_failed", "PROMPT_INVALID")
    ] * 2
    assert all(e.result and e.result.outcome == "completed" for e in finished["b"].episodes)


async def test_an_environment_that_raises_fails_its_turns(text: Text) -> None:
    engine = answering(text, {"a": "0"})
    finished = await run(engine, Counting(text, 1), text, [task("a", "a")])
    assert {e.result.reason for e in finished["a"].episodes if e.result} == {"ENVIRONMENT_FAILED"}


async def test_aborted_samples_keep_their_tokens_and_are_not_scored(text: Text) -> None:
    engine, environment = answering(text, {}), Counting(text, 1)
    await engine.abort(["a"])
    finished = await run(engine, environment, text, [task("a", "1")])
    assert {(e.result.outcome, e.result.reason) for e in finished["a"].episodes if e.result} == {("aborted", "ABORTED")}
    assert finished["a"].episodes[0].texts == ["7"]
    assert environment.steps == []


async def test_samples_fail_if_the_engine_fails(text: Text) -> None:
    def broken(request: GroupRequest, sample: int) -> list[int]:
        raise MemoryError

    finished = await run(ScriptedEngine(broken), Counting(text, 1), text, [task("a", "1")])
    assert {e.result.reason for e in finished["a"].episodes if e.result} == {"ENGINE_FAILED"}


async def test_closing_the_iterator_closes_the_episodes(text: Text) -> None:
    environment = Counting(text, 1)
    engine = answering(text, {})
    await engine.pause()
    runner = EpisodeRunner(engine, environment, text, PARAMS).run([task("a", "1"), task("bad", "bad", (4,))])
    [first] = await anext(runner)
    assert first.task.key == "bad"
    await runner.aclose()
    assert environment.closed == [("a", 0), ("a", 1)]


def test_seeds_follow_the_contract() -> None:
    """The seeds of the scheduler: label, seed, epoch, index, and sample as 8 little-endian bytes
    each, with the top bit cleared."""
    words = b"".join(number.to_bytes(8, "little") for number in (7, 1, 2, 3))
    whole = int.from_bytes(blake3(b"rollout.seed.v1" + words).digest()[:8], "little")
    assert sample_seed(7, 1, 2, 3) == whole % 2**63
    assert len({sample_seed(1, 0, 0, sample) for sample in range(64)}) == 64
