"""Child sessions: episodes of the policy that an environment opens inside another one."""

from __future__ import annotations

import asyncio
import types
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.environment import ChildTurn, ChildTurns, Environment, Observation, Result, SessionError, SingleEpisode, Task, Turn
from rollout.hosting.episodes import Checked, EnvironmentFailed, Episodes
from rollout.run.v1.run_pb2 import PromptGroup
from rollout.trajectory.v1.trajectory_pb2 import Trajectory, TrajectoryEnvelope
from rollout.weights.v1.weights_pb2 import WeightsReceipt
from rollout_testing.engine import ScriptedEngine
from rollout_testing.templates import text_of
from rollout_testing.waiting import until
from rollout_workers.data.prompts import Text
from rollout_workers.engines.base import GroupRequest, SampleDelta, SampleOutput, SamplingParams
from rollout_workers.environments.episode import Episode, EpisodeRunner, FinishedGroup, child_seed, turn_seed
from rollout_workers.environments.hosted import Hosted
from rollout_workers.environments.limits import Limits
from rollout_workers.inference.encode import encode_group, in_messages, large
from rollout_workers.learner.payload import parsed

MATH = '''
import asyncio
from rollout.environment import Result, SingleEpisode

class Review(SingleEpisode):
    """Asks two sessions at the same time, and the first one again."""

    def __init__(self, own=False):
        self.own = own

    def reset(self, task):
        return "1+1="

    async def step(self, turn):
        if turn.number == 0:
            return "+"
        first, second = self.sessions.open(), self.sessions.open()
        one, two = await asyncio.gather(first.chat("3+3="), second.chat(turn.text + "+4="))
        again = await first.chat("+" + one.text + "=")
        if self.own:
            second.reward = 0.25
        return Result(1.0, {"sum": float(int(again.text) + int(two.text))})
'''


def echo(text: Text) -> ScriptedEngine:
    """An engine that answers with the length of what it reads."""

    def answer(request: GroupRequest, sample: int) -> list[int]:
        return text.encode([str(len(request.prompt_ids))], special=False)[0].tolist()

    return ScriptedEngine(answer)


def single(episode: type[SingleEpisode]) -> Environment:
    return Checked(Episodes(episode), episode.__name__, None)


def review(**args: Any) -> Environment:
    names: dict[str, Any] = {}
    exec(MATH, names)
    return Checked(Episodes(lambda: names["Review"](**args)), "Review", None)


async def play(engine: Any, environment: Environment, text: Text, *, chat: bool = False, **limits: Any) -> list[Episode]:
    limits = {"turns": True, "turn_seconds": 60.0, "credit": "episode", "max_children": 4, **limits}
    runner = EpisodeRunner(engine, environment, text, SamplingParams(max_tokens=64), limits=Limits(**limits), chat=chat)
    task = Task("t", b"{}", (0, 3), (10, 13))
    return [episode async for groups in runner.run([task]) for group in groups for episode in group.episodes]


def encoded(episodes: Sequence[Episode]) -> list[TrajectoryEnvelope]:
    receipts: Any = types.SimpleNamespace(of=lambda version: WeightsReceipt(version=0), digest=lambda version: "")
    return encode_group(PromptGroup(run_id="r", group_size=4), FinishedGroup(episodes[0].task, tuple(episodes)), receipts, "w")


async def test_each_child_is_a_trajectory_under_its_parent(text: Text) -> None:
    engine = echo(text)
    episodes = await play(engine, review(own=True), text)
    envelopes = encoded(episodes)
    assert [(e.header.key.sample, e.header.key.part, e.header.parts) for e in envelopes] == [
        (sample, part, 3) for sample in (0, 3) for part in range(3)
    ]
    parent, first, second = (Trajectory.FromString(envelope.payload) for envelope in envelopes[3:])
    assert not parent.HasField("parent")
    assert [(c.parent.part, c.parent.turn, c.parent.child, c.parent.rewarded) for c in (first, second)] == [
        (0, 1, 0, False),
        (0, 1, 1, True),
    ]
    assert [trajectory.reward for trajectory in (parent, first, second)] == [1.0, 1.0, 0.25]
    assert [(turn.sampled, turn.text) for turn in first.turns] == [(False, "3+3="), (True, "4"), (False, "+4="), (True, "8")]
    assert [(turn.sampled, turn.text) for turn in second.turns] == [(False, "6+4="), (True, "4")]
    assert parent.metrics == {"sum": 12.0, "episode/turns": 2.0, "episode/child_sessions": 2.0}
    for trajectory in (parent, first, second):
        ids = np.frombuffer(trajectory.token_ids, np.int32)
        sampled = [ids[turn.start : turn.end].tolist() for turn in trajectory.turns if turn.sampled]
        before = [tuple(ids[: turn.start].tolist()) for turn in trajectory.turns if turn.sampled]
        asked = [tuple(np.array(request.prompt_ids).tolist()) for request in engine.requests]
        assert set(before) <= set(asked) and sampled == [text.encode([str(len(b))])[0].tolist() for b in before]
        assert parsed(trajectory.SerializeToString()).loss_mask.sum() == sum(map(len, sampled))


async def test_seeds_follow_from_sample_child_and_turn(text: Text) -> None:
    engine = echo(text)
    await play(engine, review(), text)
    seeds = {request.request_id: request.seeds for request in engine.requests}
    assert len(seeds) == 1 + 2 + 2 * 3
    for sample, seed in ((0, 10), (3, 13)):
        assert seeds[f"t#{sample}/0.0"] == (child_seed(seed, 0),) and seeds[f"t#{sample}/1.0"] == (child_seed(seed, 1),)
        assert seeds[f"t#{sample}/0.1"] == (turn_seed(child_seed(seed, 0), 1),)
    assert len({seed for each in seeds.values() for seed in each}) == 2 + 2 + 2 * 3


async def test_a_child_process_asks_sessions(text: Text, tmp_path: Path) -> None:
    (tmp_path / "review.py").write_text(MATH)
    environment = Hosted(
        {"kind": "environment", "plugin": "review.py:Review", "base_dir": str(tmp_path), "args": '{"own": true}'}
    )
    await environment.start()
    try:
        there = encoded(await play(echo(text), environment, text))
    finally:
        await environment.shutdown()
    here = encoded(await play(echo(text), review(own=True), text))
    assert [envelope.payload for envelope in there] == [envelope.payload for envelope in here]


async def test_a_child_of_messages_calls_tools() -> None:
    text = text_of("hermes")
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    said: list[Any] = []

    class Asking(SingleEpisode):
        def reset(self, task: Task) -> str:
            return "Weather in Rome?"

        async def step(self, turn: Turn) -> Result:
            helper = self.sessions.open(tools=[tool])
            reply = await helper.chat([{"role": "user", "content": "Look."}])
            said.append(reply)
            last = await helper.chat([{"role": "tool", "content": "sunny", "tool_call_id": reply.tool_calls[0].id}])
            return Result(float(last.content == "Sunny."))

    def answer(request: GroupRequest, sample: int) -> list[int]:
        call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>'
        return text.encode([call if request.request_id.endswith("/0.0") else "Sunny.<|im_end|>"], special=False)[0].tolist()

    episodes = await play(ScriptedEngine(answer), single(Asking), text, chat=True)
    assert [episode.result.reward for episode in episodes if episode.result] == [1.0, 1.0]
    assert said[0].tool_calls[0].arguments == {"city": "Rome"} and said[0].content == ""


class FailingOnChildren(ScriptedEngine):
    async def generate(self, batch: Sequence[GroupRequest]) -> AsyncIterator[SampleDelta | SampleOutput]:
        if any("/1." in request.request_id for request in batch):
            raise RuntimeError("the device is lost")
        async for output in super().generate(batch):
            yield output


async def test_a_failure_of_the_engine_in_a_child_fails_the_sample(text: Text) -> None:
    engine = FailingOnChildren(lambda request, sample: text.encode(["5"], special=False)[0].tolist())
    episodes = await play(engine, review(), text)
    assert {(e.result.outcome, e.result.reason) for e in episodes if e.result} == {("infra_failed", "ENGINE_FAILED")}
    assert [(e.header.key.part, e.header.parts) for e in encoded(episodes)] == [(0, 1), (0, 1)]


async def test_a_child_beyond_the_limit_is_an_error_that_the_environment_may_handle(text: Text) -> None:
    episodes = await play(echo(text), review(), text, max_children=1)
    assert {e.result.reason for e in episodes if e.result} == {"CHILD_SESSIONS"}

    class Greedy(SingleEpisode):
        def reset(self, task: Task) -> str:
            return "1+1="

        async def step(self, turn: Turn) -> Result:
            for count in range(9):
                try:
                    await self.sessions.open().chat("2+2=")
                except SessionError as error:
                    assert error.reason == "CHILD_SESSIONS" and "max_child_sessions" in str(error)
                    return Result(float(count))
            return Result(-1.0)

    episodes = await play(echo(text), single(Greedy), text, max_children=2)
    assert [e.result.reward for e in episodes if e.result] == [2.0, 2.0]
    assert [e.header.parts for e in encoded(episodes)] == [3] * 6


async def test_tokens_of_children_count_for_their_episode(text: Text) -> None:
    closed: list[int] = []

    class Closing(SingleEpisode):
        def reset(self, task: Task) -> str:
            return "1+1="

        async def step(self, turn: Turn) -> Result:
            session = self.sessions.open()
            await session.chat("3+3=")
            await session.chat("+3=")
            return Result(1.0)

        def close(self) -> None:
            closed.append(1)

    whole = await play(echo(text), single(Closing), text)
    total = whole[0].tokens
    assert total == 4 + 1 + 4 + 1 + 3 + 1
    [fits, _] = await play(echo(text), single(Closing), text, max_tokens=total)
    assert fits.result is not None and (fits.result.outcome, fits.result.reward) == ("completed", 1.0)
    closed.clear()
    [full, _] = await play(echo(text), single(Closing), text, max_tokens=total - 1)
    assert full.result is not None and (full.result.outcome, full.result.reward) == ("truncated", 0.0)
    await until(lambda: len(closed) == 2)  # the instances whose steps were waiting


async def test_a_batched_environment_asks_with_numbers(text: Text) -> None:
    class Batched:
        async def reset(self, tasks: Sequence[Task]) -> list[Observation]:
            return [Observation(text="1+1=") for _ in tasks]

        async def step(self, turns: Sequence[Turn]) -> list[Any]:
            return [
                Result(float(turn.replies[0].text), child_rewards={7: 0.5})
                if turn.replies
                else ChildTurns((ChildTurn(7, Observation(text="2+2=")),))
                for turn in turns
            ]

        async def close(self, episodes: Sequence[tuple[str, int]]) -> None: ...

    episodes = await play(echo(text), Batched(), text)  # type: ignore[arg-type]
    rewards = [(e.header.key.part, e.header.reward) for e in encoded(episodes)]
    assert rewards == [(0, 4.0), (1, 0.5), (0, 4.0), (1, 0.5)]


@pytest.mark.parametrize("turns", [(), (ChildTurn(-1, Observation(text="a")),), (ChildTurn(0, Observation(text="a")),) * 2])
async def test_wrong_numbers_are_bad_results(turns: Any, text: Text) -> None:
    class Wrong(SingleEpisode):
        def reset(self, task: Task) -> str:
            return "1+1="

        def step(self, turn: Turn) -> ChildTurns:
            return ChildTurns(turns)

    episodes = await play(echo(text), single(Wrong), text)
    assert {e.result.reason for e in episodes if e.result} == {"ENVIRONMENT_BAD_RESULT"}


async def test_one_session_answers_one_question_at_a_time(text: Text) -> None:
    class Twice(SingleEpisode):
        def reset(self, task: Task) -> str:
            return "1+1="

        async def step(self, turn: Turn) -> Result:
            session = self.sessions.open()
            await asyncio.gather(session.chat("1"), session.chat("2"))
            return Result(1.0)

    episodes = await play(echo(text), single(Twice), text)
    assert {e.result.reason for e in episodes if e.result} == {"CHILD_SESSION"}


async def test_only_the_policy_answers_sessions(text: Text) -> None:
    class Judged(SingleEpisode):
        def reset(self, task: Task) -> str:
            return "1+1="

        async def step(self, turn: Turn) -> Result:
            await self.sessions.open("judge").chat("1")
            return Result(1.0)

    episodes = await play(echo(text), single(Judged), text)
    assert {e.result.reason for e in episodes if e.result} == {"CHILD_MODEL"}


async def test_episodes_that_wait_for_a_child_are_not_saved() -> None:
    class Saved(SingleEpisode):
        def reset(self, task: Task) -> str:
            return "1+1="

        async def step(self, turn: Turn) -> Result:
            await self.sessions.open().chat("2")
            return Result(1.0)

        def state_dict(self) -> dict[str, int]:
            return {}

    episodes, task = Episodes(Saved), Task("t", b"{}", (0,), (0,))
    await episodes.reset([task])
    [asked] = await episodes.step([Turn(task, 0, 0, "", np.zeros(0, np.int32), "", False)])
    assert isinstance(asked, ChildTurns)
    with pytest.raises(EnvironmentFailed, match="child sessions"):
        episodes.state_dict()
    await episodes.close([("t", 0)])
    assert episodes.state_dict() == {"episodes": []}


def test_the_parts_of_a_sample_travel_together() -> None:
    envelopes: list[TrajectoryEnvelope] = []
    for sample in range(3):
        for part in range(3):
            envelope = TrajectoryEnvelope(payload=bytes(200 << 10))
            envelope.header.key.sample, envelope.header.key.part = sample, part
            envelopes.append(envelope)
    assert large(envelopes[:1]) == [] and large(envelopes) == envelopes, "three parts exceed a message together"
    for envelope in envelopes:
        envelope.payload = bytes(900)
    batches = in_messages(envelopes, 6000)
    assert [[e.header.key.sample for e in batch.trajectories] for batch in batches] == [[0] * 3, [1] * 3, [2] * 3]
