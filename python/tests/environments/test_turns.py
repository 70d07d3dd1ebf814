"""Episodes of several turns: tokens, tool calls, limits, deadlines, and where rewards count."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.environment import Environment, Observation, Refusal, Result, SingleEpisode, Task, Turn
from rollout.environments.vector import Gymnasium
from rollout.hosting import wire
from rollout.hosting.child import ChildProcess
from rollout.hosting.episodes import Checked, Episodes
from rollout.plugin.v1 import plugin_pb2 as pb
from rollout.run.v1.run_pb2 import PromptGroup
from rollout.trajectory.v1.trajectory_pb2 import Trajectory, TrajectoryHeader
from rollout.weights.v1.weights_pb2 import WeightsReceipt
from rollout_testing.engine import ScriptedEngine
from rollout_testing.templates import text_of
from rollout_testing.waiting import until
from rollout_workers.data.prompts import Text
from rollout_workers.engines.base import GroupRequest, SamplingParams
from rollout_workers.environments.dialogue import Dialogue
from rollout_workers.environments.episode import Clock, Episode, EpisodeRunner, FinishedGroup
from rollout_workers.environments.hosted import Hosted
from rollout_workers.environments.limits import Limits, credited
from rollout_workers.inference.encode import encode_group
from rollout_workers.rewards.process_reward import NOTHING

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def single(episode: type[SingleEpisode], *args: Any) -> Environment:
    return Checked(Episodes(lambda: episode(*args)), episode.__name__, None)


async def play(
    engine: ScriptedEngine, environment: Environment, text: Text, *, samples: int = 1, chat: bool = False, **limits: Any
) -> list[Episode]:
    limits = {"name": "test", "turns": True, "turn_seconds": 60.0, "credit": "episode", **limits}
    runner = EpisodeRunner(engine, environment, text, SamplingParams(max_tokens=64), limits=Limits(**limits), chat=chat)
    task = Task("t", b"{}", tuple(range(samples)), tuple(range(samples)))
    return [episode async for groups in runner.run([task]) for group in groups for episode in group.episodes]


def scripted(text: Text, answers: Sequence[str]) -> ScriptedEngine:
    """The n-th turn of every episode is the n-th answer."""

    def answer(request: GroupRequest, sample: int) -> list[int]:
        number = int(request.request_id.rpartition(".")[2]) if "#" in request.request_id else 0
        return text.encode([answers[number]], special=False)[0].tolist()

    return ScriptedEngine(answer)


class Counting(SingleEpisode):
    """Rewards each turn with its number, and ends after three."""

    def reset(self, task: Task) -> str:
        return "1+1="

    def step(self, turn: Turn) -> Observation | Result:
        if turn.number == 2:
            return Result(10.0, {"last": 1.0})
        return Observation(text="+1=", reward=float(turn.number + 1), metrics={"steps": 1.0})


async def test_rewards_of_turns_are_summed(text: Text) -> None:
    [episode] = await play(scripted(text, ["2", "33", "4"]), single(Counting), text)
    assert text.decode([episode.context()]) == ["1+1=2+1=33+1=4"]
    assert episode.result is not None and episode.result.reward == 13.0
    assert episode.result.metrics == {"steps": 2.0, "last": 1.0, "episode/turns": 3.0, "reward/turns": 3.0}
    assert episode.turn_spans() == [(0, 1), (4, 6), (9, 10)]


async def test_the_tokens_of_turns_carry_their_rewards(text: Text) -> None:
    [episode] = await play(scripted(text, ["2", "33", "4"]), single(Counting), text, credit="turn")
    assert episode.result is not None and episode.result.reward == 10.0
    assert episode.result.token_rewards == (1.0, 0, 0, 0, 0, 2.0, 0, 0, 0, NOTHING)


def encoded(episode: Episode) -> tuple[TrajectoryHeader, Trajectory]:
    receipts: Any = types.SimpleNamespace(of=lambda version: WeightsReceipt(version=0), digest=lambda version: "")
    [envelope] = encode_group(PromptGroup(run_id="r", group_size=1), FinishedGroup(episode.task, (episode,)), receipts, "w")
    return envelope.header, Trajectory.FromString(envelope.payload)


async def test_a_trajectory_has_its_turns_and_the_header_their_times(text: Text) -> None:
    """Payloads of equal episodes have equal bytes, so that the times are in the header alone."""
    headers, trajectories = zip(
        *[encoded((await play(scripted(text, ["2", "33", "4"]), single(Counting), text))[0]) for _ in range(2)], strict=True
    )
    assert trajectories[0] == trajectories[1]
    turns = trajectories[0].turns
    assert [(turn.sampled, turn.start, turn.end, turn.text, turn.reward, dict(turn.metrics)) for turn in turns] == [
        (False, 0, 4, "1+1=", 0.0, {}),
        (True, 4, 5, "2", 1.0, {"steps": 1.0}),
        (False, 5, 8, "+1=", 0.0, {}),
        (True, 8, 10, "33", 2.0, {"steps": 1.0}),
        (False, 10, 13, "+1=", 0.0, {}),
        (True, 13, 14, "4", 0.0, {}),
    ]
    times = headers[0].times
    moments = [moment for turn in times.turns for moment in (turn.asked_ms, turn.sampled_ms, turn.answered_ms)]
    assert len(moments) == 9 and moments == sorted(moments) and times.began_unix_ms > 1_600_000_000_000


async def test_the_times_of_a_long_episode_are_bounded(text: Text) -> None:
    [episode] = await play(scripted(text, ["2", "33", "4"]), single(Counting), text)
    episode.clocks = [Clock(episode.began, episode.began + 9e5, episode.began + 1e6, (0.25, -1.0, 1e9)) for _ in range(500)]
    header, _ = encoded(episode)
    assert 100 < len(header.times.turns) < 500 and header.times.ByteSize() <= 4096
    assert list(header.times.turns[0].tool_ms) == [250, 0, (1 << 32) - 1]


def test_credit_follows_a_plain_computation() -> None:
    """Two turns of two and three tokens around an observation of one: the tokens that a reward is
    for are those before it, so sums from each token on are the returns of the turns."""
    spans, rewards = [(0, 2), (3, 6)], [1.0, 2.0]
    result = Result(4.0, token_rewards=(0.25, 0.0, 0.5), turn_rewards=(0.5, 0.0))
    whole = credited(result, spans, list(rewards), "episode")
    assert (whole.reward, whole.token_rewards, whole.turn_rewards) == (4.0 + 3.0 + 0.5 + 0.75, (), ())
    turn = credited(result, spans, list(rewards), "turn")
    assert (turn.reward, turn.token_rewards) == (4.0, (0, 1.5, 0, 0, 0, 2.75))
    token = credited(result, spans, list(rewards), "token")
    assert (token.reward, token.token_rewards) == (4.0, (0, 1.5, 0, 0.25, 0, 2.5))
    for each in (turn, token):
        returns = np.cumsum(each.token_rewards[::-1])[::-1]
        assert returns[0] == returns[1] == 4.25 and returns[5] == (2.75 if each is turn else 2.5)


async def test_a_chat_with_a_tool_extends_the_earlier_ids() -> None:
    """Messages of the tool follow the sampled ids, which are never tokenized again."""
    text = text_of("hermes")
    seen: list[Turn] = []

    class Asking(SingleEpisode):
        def reset(self, task: Task) -> Observation:
            return Observation(messages=({"role": "user", "content": "Weather in Rome?"},), tools=(WEATHER,))

        def step(self, turn: Turn) -> Any:
            seen.append(turn)
            if not turn.tool_calls:
                return Result(1.0)
            return [{"role": "tool", "content": "sunny", "tool_call_id": turn.tool_calls[0].id}]

    call = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>'
    engine = scripted(text, [call, "Sunny.<|im_end|>"])
    [episode] = await play(engine, single(Asking), text)
    first, second = seen
    assert (first.content, first.tool_calls[0].name, first.tool_calls[0].arguments) == ("I look.", "weather", {"city": "Rome"})
    assert (second.content, second.tool_calls, second.number) == ("Sunny.", (), 1)
    before, after = (np.array(request.prompt_ids) for request in engine.requests)
    assert np.array_equal(after[: len(before)], before)
    assert np.array_equal(after[len(before) :][: len(first.token_ids)], first.token_ids)
    assert "sunny" in text.whole([after[len(before) + len(first.token_ids) :]])[0]
    assert [request.session for request in engine.requests] == ["t", "t#0"]
    assert episode.result is not None and episode.result.reward == 1.0


class Endless(SingleEpisode):
    closed = 0

    def reset(self, task: Task) -> str:
        return "1+1="

    def step(self, turn: Turn) -> Observation:
        return Observation(text="+1=", reward=1.0)

    def close(self) -> None:
        Endless.closed += 1


@pytest.mark.parametrize(("limits", "turns"), [({"max_turns": 2}, 2), ({"max_tokens": 15}, 3)])
async def test_an_episode_that_is_too_long_is_truncated(limits: dict[str, Any], turns: int, text: Text) -> None:
    Endless.closed = 0
    engine = scripted(text, ["2"] * 9)
    [episode] = await play(engine, single(Endless), text, **limits)
    assert episode.result is not None and (episode.result.outcome, episode.result.reward) == ("truncated", float(turns))
    assert episode.turns == turns and isinstance(episode.parts[-1], type(episode.parts[0])), "it ends with a turn"
    await asyncio.sleep(0)
    assert Endless.closed == 1
    if "max_tokens" in limits:
        assert [request.params.max_tokens for request in engine.requests] == [11, 7, 3]


def acting(act: Callable[[Turn], Any]) -> Environment:
    class Acting(SingleEpisode):
        def reset(self, task: Task) -> str:
            return "1+1="

        def step(self, turn: Turn) -> Any:
            return act(turn)

    return single(Acting)


def raised(error: BaseException) -> Any:
    raise error


MISBEHAVIOR: dict[str, tuple[Callable[[Turn], Any], str, str]] = {
    "exception": (lambda turn: 1 / 0, "ENVIRONMENT_FAILED", "`Acting.step` raised ZeroDivisionError: division by zero"),
    "exit": (lambda turn: raised(SystemExit(3)), "ENVIRONMENT_FAILED", "`Acting.step` called sys.exit"),
    "nan": (
        lambda turn: Result(float("nan")),
        "ENVIRONMENT_BAD_RESULT",
        "`Acting.step` returned nan as the reward; expected a finite number",
    ),
    "metric": (
        lambda turn: Result(1.0, {"score": float("inf")}),
        "ENVIRONMENT_BAD_RESULT",
        "`Acting.step` returned inf as the metric `score`; expected a finite number",
    ),
    "not a number": (
        lambda turn: Result("yes"),  # type: ignore[arg-type]
        "ENVIRONMENT_BAD_RESULT",
        "`Acting.step` returned str 'yes' as the reward; expected a finite number",
    ),
    "a number in a text": (
        lambda turn: Result("1.0"),  # type: ignore[arg-type]
        "ENVIRONMENT_BAD_RESULT",
        "`Acting.step` returned str '1.0' as the reward; expected a finite number",
    ),
    "nothing": (
        lambda turn: None,
        "ENVIRONMENT_BAD_RESULT",
        "`Acting.step` returned NoneType; expected an Observation, a Result, a text, or a list of messages",
    ),
    "gymnasium": (
        lambda turn: ("obs", 1.0, True, False, {}),
        "ENVIRONMENT_BAD_RESULT",
        "`Acting.step` returned tuple ('obs', 1.0, True, False, {}); "
        "expected an Observation, a Result, a text, or a list of messages",
    ),
    "shape": (
        lambda turn: Observation(np.zeros((2, 3), np.float32)),  # type: ignore[arg-type]
        "ENVIRONMENT_BAD_RESULT",
        "`Acting.step` returned an observation with token_ids of float32[2, 3]; expected a numpy array int32[N]",
    ),
    "empty": (
        lambda turn: "",
        "ENVIRONMENT_BAD_RESULT",
        "`Acting.step` returned an empty observation; give it messages, token_ids, or a text",
    ),
    "large": (
        lambda turn: "x" * 300_000_000,
        "ENVIRONMENT_BAD_RESULT",
        "`Acting.step` returned an observation of 300 MB; the limit is 17 MB; shorten it, or name large content by its URL",
    ),
    "turn rewards": (
        lambda turn: Result(turn_rewards=(1.0, 2.0)),
        "ENVIRONMENT_BAD_RESULT",
        "`Acting.step` returned a result with 2 turn_rewards; the episode has 1 turns",
    ),
    "no reason": (
        lambda turn: Result(outcome="infra_failed"),
        "ENVIRONMENT_BAD_RESULT",
        "`Acting.step` returned a result with outcome 'infra_failed' and no reason; "
        "name the reason, such as `reason='SIMULATOR_DOWN'`",
    ),
    "tool calls": (
        lambda turn: [{"role": "assistant", "content": "", "tool_calls": ["weather"]}],
        "ENVIRONMENT_BAD_RESULT",
        "`Acting.step` returned a message whose tool_calls are not a list of calls; "
        'write [{"id": ..., "function": {"name": ..., "arguments": ...}}]',
    ),
}


@pytest.mark.parametrize("name", MISBEHAVIOR)
async def test_misbehavior_fails_the_episode_with_a_message(name: str, text: Text) -> None:
    act, reason, message = MISBEHAVIOR[name]
    [episode] = await play(scripted(text, ["2"]), acting(act), text)
    assert episode.result is not None and (episode.result.outcome, episode.result.reason) == ("infra_failed", reason)
    assert episode.result.message.startswith(message)


class Batched:
    """Answers with too few results."""

    async def reset(self, tasks: Sequence[Task]) -> list[Observation | Refusal]:
        return [Observation(text="1+1=") for _ in tasks]

    async def step(self, turns: Sequence[Turn]) -> list[Observation | Result]:
        return []

    async def close(self, episodes: Sequence[tuple[str, int]]) -> None: ...


async def test_a_wrong_number_of_results_fails_the_call(text: Text) -> None:
    episodes = await play(scripted(text, ["2"]), Batched(), text, samples=2)
    for episode in episodes:
        assert episode.result is not None and episode.result.reason == "ENVIRONMENT_BAD_RESULT"
        assert episode.result.message.endswith("return one item for each turn, in order")


async def test_samples_that_begin_differently_are_refused(text: Text) -> None:
    class Random(SingleEpisode):
        count = 0

        def reset(self, task: Task) -> str:
            Random.count += 1
            return f"{Random.count}+1="

    episodes = await play(scripted(text, []), single(Random), text, samples=2)
    assert {e.result.reason for e in episodes if e.result} == {"ENVIRONMENT_BAD_RESULT"}


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ("turn_seconds", "ENVIRONMENT_TIMEOUT"),
        ("episode_seconds", "EPISODE_TIMEOUT"),
        ("group_seconds", "GROUP_TIMEOUT"),
    ],
)
async def test_a_hung_environment_costs_its_deadline_alone(limit: str, reason: str, text: Text) -> None:
    """The first sample hangs; the other one ends."""

    class Hanging(SingleEpisode):
        def reset(self, task: Task) -> str:
            return "1+1="

        async def step(self, turn: Turn) -> Result:
            if turn.sample == 0:
                await asyncio.Event().wait()
            return Result(1.0)

    began = asyncio.get_running_loop().time()
    hung, other = await play(scripted(text, ["2"]), single(Hanging), text, samples=2, **{limit: 0.2})
    assert asyncio.get_running_loop().time() - began < 5
    assert hung.result is not None and (hung.result.outcome, hung.result.reason) == ("infra_failed", reason)
    assert other.result is not None and other.result.outcome == "completed"


class SlowStart:
    """Begins its episodes only when ``go`` is set, also if the call is cancelled before, as another
    process would."""

    def __init__(self) -> None:
        self.go, self.begun, self.open = asyncio.Event(), asyncio.Event(), set[tuple[str, int]]()

    async def reset(self, tasks: Sequence[Task]) -> list[Observation | Refusal]:
        try:
            await self.go.wait()
        finally:
            self.open |= {(task.key, sample) for task in tasks for sample in task.samples}
            self.begun.set()
        return [Observation(text="1+1=")] * len(tasks)

    async def step(self, turns: Sequence[Turn]) -> list[Observation | Result]:
        return [Result(1.0)] * len(turns)

    async def close(self, episodes: Sequence[tuple[str, int]]) -> None:
        self.open -= set(episodes)


@pytest.mark.parametrize("finishes", [True, False])
async def test_an_episode_that_expires_while_it_begins_is_closed(finishes: bool, text: Text) -> None:
    environment = SlowStart()
    runner = EpisodeRunner(
        scripted(text, ["2"]),
        environment,
        text,
        SamplingParams(max_tokens=8),
        limits=Limits("test", turns=True, episode_seconds=0.05),
    )
    async for [group] in runner.run([Task("t", b"{}", (0, 1), (0, 1))]):
        assert {e.result.reason for e in group.episodes if e.result} == {"EPISODE_TIMEOUT"}
        if finishes:
            environment.go.set()
            await environment.begun.wait()
    await until(lambda: environment.begun.is_set() and not environment.open, seconds=10)


async def test_a_group_ends_at_its_deadline_while_it_is_sampled(text: Text) -> None:
    engine = scripted(text, ["2"])
    engine.gate.clear()
    [episode] = await play(engine, single(Counting), text, group_seconds=0.1)
    assert episode.result is not None and episode.result.reason == "GROUP_TIMEOUT"


HOSTED = """
import os, time, asyncio
from rollout.environment import Result, SingleEpisode

class Bad(SingleEpisode):
    def reset(self, task):
        return "1+1="

    async def step(self, turn):
        what = ["end", "sleep", "block", "exit"][turn.sample]
        if what == "sleep":
            await asyncio.sleep(100)
        if what == "block":
            await asyncio.sleep(0.3)
            time.sleep(100)
        if what == "exit":
            os._exit(7)
        return Result(reward=1.0)
"""


async def hosted(folder: Path, text: Text, samples: int, seconds: float = 60.0) -> list[tuple[str, str]]:
    (folder / "bad.py").write_text(HOSTED)
    environment = Hosted({"kind": "environment", "plugin": "bad.py:Bad", "base_dir": str(folder)}, processes=1)
    await environment.start()
    try:
        episodes = await play(scripted(text, ["2"]), environment, text, samples=samples, turn_seconds=seconds)
        [again] = await play(scripted(text, ["2"]), environment, text)
        assert again.result is not None and again.result.outcome == "completed", "the process is alive, or another has started"
        return [(e.result.outcome, e.result.reason) for e in episodes if e.result]
    finally:
        await environment.shutdown()


async def test_a_hosted_episode_that_sleeps_ends_alone(tmp_path: Path, text: Text) -> None:
    assert await hosted(tmp_path, text, 2, 1.0) == [("completed", ""), ("infra_failed", "ENVIRONMENT_TIMEOUT")]


async def test_a_hosted_episode_that_blocks_ends_its_process(tmp_path: Path, text: Text) -> None:
    found = await hosted(tmp_path, text, 3, 1.0)
    assert found[0] == ("completed", "") and found[2] == ("infra_failed", "ENVIRONMENT_TIMEOUT")


async def test_a_process_that_exits_fails_its_episodes(tmp_path: Path, text: Text) -> None:
    found = await hosted(tmp_path, text, 4)
    assert set(found[1:]) == {("infra_failed", "ENVIRONMENT_EXITED")}


class Asking(SingleEpisode):
    """Begins with a message; counts its open instances."""

    open = 0
    tools: tuple[Any, ...] = ()

    def reset(self, task: Task) -> Any:
        type(self).open += 1
        return Observation(messages=({"role": "user", "content": "Weather?"},), tools=self.tools)

    def step(self, turn: Turn) -> Any:
        return [{"role": "user", "content": "Again?"}]

    def close(self) -> None:
        type(self).open -= 1


@pytest.mark.parametrize("tool", [{"name": "weather", "parameters": {}}, "weather", {"function": {"parameters": {}}}])
async def test_a_tool_of_another_shape_fails_the_task(tool: Any) -> None:
    class Wrong(Asking):
        tools = (tool,)

    text = text_of("hermes")
    async with asyncio.timeout(20):
        [episode] = await play(scripted(text, ["Sunny.<|im_end|>"]), single(Wrong), text)
    assert episode.result is not None and (episode.result.outcome, episode.result.reason) == (
        "infra_failed", "ENVIRONMENT_BAD_RESULT",
    )  # fmt: skip


@pytest.mark.parametrize("method", ["begin", "message", "following"])
async def test_an_unexpected_error_of_the_template_fails_its_episode_alone(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two samples that are ready together, the error fails one; an error of the first prompt
    fails both. Their instances are closed."""
    whole, calls = getattr(Dialogue, method), 0

    def broken(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyError("function")
        return whole(*args)

    monkeypatch.setattr(Dialogue, method, broken)

    class Counted(Asking): ...

    text = text_of("hermes")
    async with asyncio.timeout(20):
        episodes = await play(scripted(text, ["Sunny.<|im_end|>"] * 2), single(Counted), text, samples=2, max_turns=2)
    await asyncio.sleep(0)
    found = [(e.result.outcome, e.result.reason) for e in episodes if e.result]
    failure = ("infra_failed", "ENVIRONMENT_FAILED")
    assert sorted(found) == ([failure] * 2 if method == "begin" else [failure, ("truncated", "")])
    assert Counted.open == 0


async def test_a_text_that_cannot_be_decoded_fails_its_episode_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of("hermes")
    decode, bad = text.decode, text.encode(["Rainy."], special=False)[0].tolist()

    def broken(ids: Any) -> list[str]:
        ids = [each.tolist() for each in ids]
        if bad in ids:
            raise OverflowError("out of range")
        return decode([np.array(each, np.int32) for each in ids])

    monkeypatch.setattr(text, "decode", broken)
    engine = ScriptedEngine(lambda request, sample: text.encode([["Rainy.", "Sunny."][sample]], special=False)[0].tolist())

    class Ending(Asking):
        def step(self, turn: Turn) -> Any:
            return Result(1.0)

    async with asyncio.timeout(20):
        episodes = await play(engine, single(Ending), text, samples=2)
    assert [(e.result.outcome, e.result.reason) for e in episodes if e.result] == [
        ("infra_failed", "ENVIRONMENT_FAILED"), ("completed", ""),
    ]  # fmt: skip


async def test_an_episode_with_a_bad_answer_is_closed(text: Text) -> None:
    class Bad(Asking):
        def reset(self, task: Task) -> str:
            super().reset(task)
            return "1+1="

        def step(self, turn: Turn) -> Any:
            return None

    await play(scripted(text, ["2"]), single(Bad), text, samples=2)
    await asyncio.sleep(0)
    assert Bad.open == 0


async def test_an_episode_whose_first_observation_cannot_be_rendered_is_closed(text: Text) -> None:
    """The tokenizer has no chat template."""

    class Unrendered(Asking): ...

    [episode] = await play(scripted(text, ["2"]), single(Unrendered), text)
    assert episode.result is not None and episode.result.outcome == "infra_failed"
    await asyncio.sleep(0)
    assert Unrendered.open == 0


@pytest.mark.parametrize("outcome", ["infra_failed", "aborted"])
async def test_a_failure_after_several_turns_has_no_rewards_of_tokens(outcome: Any, text: Text) -> None:
    class Failing(Counting):
        def step(self, turn: Turn) -> Observation | Result:
            if turn.number == 0:
                return Observation(text="+1=")
            tokens = (1.0,) * len(turn.token_ids)
            scored = (1.0,) * (len(turn.context_ids) - len(turn.prompt_ids)) + tokens
            return Result(
                0.0, {}, outcome, "SIMULATOR_DOWN", token_rewards=tokens, teacher_logprobs=scored, turn_rewards=(1.0, 1.0)
            )

    [episode] = await play(scripted(text, ["2", "33"]), single(Failing), text)
    result = episode.result
    assert result is not None and (result.outcome, result.reason) == (outcome, "SIMULATOR_DOWN")
    assert result.token_rewards == result.turn_rewards == result.teacher_logprobs == ()


DIVIDED = """
import os
from rollout.environment import Observation, Refusal, Result

class Divided:
    def __init__(self):
        self.open = set()

    async def reset(self, tasks):
        if any(task.row == 1 for task in tasks):
            raise ValueError("no reset")
        return [Refusal("ROW_INVALID", "no") if task.row == 4 else Observation(text="1+1=") for task in tasks]

    async def step(self, turns):
        if any(turn.task.row == 2 for turn in turns):
            os._exit(7)
        return [Result() for _ in turns]

    async def close(self, episodes): ...
"""


def divided(folder: Path) -> Hosted:
    (folder / "divided.py").write_text(DIVIDED)
    return Hosted({"kind": "environment", "plugin": "divided.py:Divided", "base_dir": str(folder)}, processes=2)


def keys_of_both(environment: Hosted) -> tuple[str, str]:
    """Two task keys of different processes."""
    first, *others = (f"t{number}" for number in range(20))
    return first, next(key for key in others if environment._child(key) is not environment._child(first))


def row(key: str, number: int) -> Task:
    return Task(key, b"{}", (0,), (0,), number)


async def test_a_process_fails_its_own_tasks_and_turns_alone(tmp_path: Path) -> None:
    environment = divided(tmp_path)
    one, other = keys_of_both(environment)
    await environment.start()
    try:
        refused, started = await environment.reset([row(one, 1), row(other, 0)])
        assert isinstance(refused, Refusal) and refused.reason == "ENVIRONMENT_FAILED" and "no reset" in refused.message
        assert isinstance(started, Observation) and list(environment._of) == [other]

        tasks = [row(one, 2), row(other, 0)]
        await environment.reset(tasks)
        no_ids = np.zeros(0, np.int32)
        gone, ended = await environment.step([Turn(task, 0, 0, "", no_ids, "", False) for task in tasks])
        assert isinstance(gone, Result) and (gone.outcome, gone.reason) == ("infra_failed", "ENVIRONMENT_EXITED")
        assert isinstance(ended, Result) and ended.outcome == "completed"
    finally:
        await environment.shutdown()


async def test_a_hosted_environment_forgets_refused_tasks_and_lost_episodes(tmp_path: Path) -> None:
    environment = divided(tmp_path)
    one, other = keys_of_both(environment)
    await environment.start()
    try:
        refused, _ = await environment.reset([row(one, 4), row(other, 2)])
        assert isinstance(refused, Refusal) and list(environment._of) == [other]
        turn = Turn(row(other, 2), 0, 0, "", np.zeros(0, np.int32), "", False)
        for _ in range(2):  # the process ends, and is then known to have ended
            [lost] = await environment.step([turn])
            assert isinstance(lost, Result) and lost.reason == "ENVIRONMENT_EXITED"
        assert not environment._of
    finally:
        await environment.shutdown()


async def test_a_cancelled_call_of_several_processes_is_cancelled(tmp_path: Path) -> None:
    environment = divided(tmp_path)

    async def hang(*args: Any) -> Any:
        await asyncio.Event().wait()

    for child in environment._children:
        child.call = hang  # type: ignore[method-assign]
    one, other = keys_of_both(environment)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await environment.reset([row(one, 0), row(other, 0)])


WAITING = """
import asyncio
from rollout.environment import Observation, Result

class Waiting:
    batched = False
    waits_for_siblings = True

    async def reset(self, tasks):
        return [Observation(text="1+1=") for _ in tasks]

    async def step(self, turns):
        await asyncio.sleep(1.5 if turns[0].sample == 0 else 100)
        return [Result(1.0)]

    async def close(self, episodes): ...
"""


async def test_a_step_that_waits_for_siblings_has_no_deadline_of_its_own(tmp_path: Path, text: Text) -> None:
    """The deadline of a turn is over before the first sample's step ends; the second's never
    does."""
    (tmp_path / "waiting.py").write_text(WAITING)
    environment = Hosted({"kind": "environment", "plugin": "waiting.py:Waiting", "base_dir": str(tmp_path)}, processes=1)
    await environment.start()
    try:
        limits = {"turn_seconds": 1.0, "episode_seconds": 5.0}
        episodes = await play(scripted(text, ["2"]), environment, text, samples=2, **limits)
    finally:
        await environment.shutdown()
    found = [(e.result.outcome, e.result.reason) for e in episodes if e.result]
    assert found == [("completed", ""), ("infra_failed", "EPISODE_TIMEOUT")]


def test_a_step_of_a_vector_environment_waits_for_siblings() -> None:
    assert Gymnasium.waits_for_siblings and not Gymnasium.batched


async def test_the_errors_of_a_blocked_process_name_the_call_that_blocks(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import asyncio, time\nfrom rollout.environment import SingleEpisode\n\n\nclass Slow(SingleEpisode):\n"
        "    async def reset(self, task):\n        await asyncio.sleep(0.2)\n        time.sleep(100)\n"
        "    async def step(self, turn):\n        await asyncio.sleep(100)\n"
    )
    process = ChildProcess([{"kind": "environment", "plugin": "slow.py:Slow", "base_dir": str(tmp_path)}])
    await process.start()
    try:
        task = pb.ResetEnvironmentRequest(plugin="Slow", tasks=[wire.task_to(Task("a", b"{}", (0,), (1,)))])
        found = await asyncio.gather(
            process.call("ResetEnvironment", task, 0.5),
            process.call("ResetEnvironment", task, 60.0),
            return_exceptions=True,
        )
    finally:
        await process.close()
    blocked, beside = found
    assert isinstance(blocked, wire.EnvironmentTimeout) and "`Slow.reset` took longer than 0.5 s and blocked" in str(blocked)
    assert "run its work in a thread" in blocked.fix
    assert isinstance(beside, wire.EnvironmentExited)
    assert "has no answer, because `Slow.reset` blocked the process" in str(beside)
