"""The conformance suite of the ways to run a plugin: each gives the same scores, typed errors, and
deadlines, also with a sidecar in another language (``libs/plugin/plugintest`` is that of the Go
SDK).

@pytest.mark.parametrize("case", CASES)
async def test_child(case: str, tmp_path: Path) -> None:
    await run(case, start_child, tmp_path)
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import numpy as np
import pytest

from rollout.environment import Answer, Observation, Refusal, Result, Task, Turn
from rollout.errors import RolloutError
from rollout.hosting import wire
from rollout.hosting.host import Source
from rollout.hosting.runner import Runner
from rollout.plugin.v1 import plugin_pb2 as pb

PLUGINS = '''
import time

def score(samples):
    return [one(sample) for sample in samples]

def one(sample):
    word = sample.row.get("do")
    if word == "raise":
        raise ValueError("bad sample")
    if word == "nan":
        return float("nan")
    if word == "hang":
        time.sleep(3)
    if word == "parts":
        return {"reward": -0.0, "length": 2, "token_rewards": [0.5] * len(sample.token_ids),
                "step_rewards": [{"start": 0, "end": 1, "reward": 0.25}]}
    return float(len(sample.prompt) + len(sample.completion))

def numbers(split):
    if split == "raise":
        raise ValueError("no such split")
    for number in range(5):
        yield {"number": number}

async def slow(samples):
    return [1.0 for _ in samples]

def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

class Echo:
    """Ends an episode at the answer `stop`."""

    def __init__(self):
        self.turns = {}

    async def reset(self, tasks):
        from rollout.environment import Observation, Refusal
        import numpy as np
        self.turns |= {task.key: 0 for task in tasks}
        bad = Refusal("ROW_INVALID", "not an object")
        return [bad if task.row_json == b"[]" else Observation(np.array([task.row], np.int32), task.key) for task in tasks]

    async def step(self, turns):
        from rollout.environment import Observation, Result
        answers = []
        for turn in turns:
            if turn.text == "fail":
                raise RuntimeError("the simulator is down")
            self.turns[turn.task.key] += 1
            outcome = "truncated" if turn.truncated else "completed"
            result = Result(float(self.turns[turn.task.key]), {"sample": float(turn.sample)}, outcome)
            answers.append(result if turn.text == "stop" else Observation(turn.token_ids, turn.text))
        return answers

    async def close(self, episodes):
        for key, _ in episodes:
            self.turns.pop(key, None)

    def state_dict(self):
        return {"turns": self.turns}

    def load_state_dict(self, state):
        self.turns = state["turns"]
'''
SOURCES = (
    ("reward", "plugins.py:score"),
    ("evaluation", "plugins.py:slow"),
    ("tool", "plugins.py:add"),
    ("environment", "plugins.py:Echo"),
    ("data_source", "plugins.py:numbers"),
)

Start = Callable[[Sequence[Source]], AbstractAsyncContextManager[Runner]]
"""Starts a runner of these sources, and closes it on exit."""
Check = Callable[[Runner], Awaitable[None]]
CASES: dict[str, Check] = {}


def case(check: Check) -> Check:
    """Register a check."""
    CASES[check.__name__] = check
    return check


async def run(name: str, start: Start, folder: Path) -> None:
    """Run one case with the suite's plugins, which are written to ``folder``."""
    (folder / "plugins.py").write_text(PLUGINS)
    sources = [{"kind": kind, "plugin": plugin, "base_dir": str(folder)} for kind, plugin in SOURCES]
    async with asyncio.timeout(120), start(sources) as runner:
        await (CASES | PYTHON_CASES)[name](runner)


def rewards(*words: str) -> pb.RewardRequest:
    """A request of one group per word, each of two samples."""
    samples = [
        pb.RewardSample(prompt="1+1=", completion="42", token_ids=np.array([5, 6], "<i4").tobytes()),
        pb.RewardSample(prompt="1+1=", completion=""),
    ]
    return pb.RewardRequest(
        plugin="score", groups=[pb.RewardGroup(row_json=json.dumps({"do": word}).encode(), samples=samples) for word in words]
    )


@case
async def scores_arrive_in_order(runner: Runner) -> None:
    scores = wire.scores_from((await runner.call("Reward", rewards("", ""), 60)).scores)
    assert [score.reward for score in scores] == [6.0, 4.0, 6.0, 4.0]


@case
async def parts_of_a_completion_have_rewards(runner: Runner) -> None:
    request = rewards("parts")
    del request.groups[0].samples[1]
    [score] = wire.scores_from((await runner.call("Reward", request, 60)).scores)
    assert repr(score.reward) == "-0.0" and dict(score.metrics) == {"length": 2.0} and tuple(score.token_rewards) == (0.5, 0.5)
    assert [(step.start, step.end, step.reward) for step in score.steps] == [(0, 1, 0.25)]


async def errors_have_a_place(runner: Runner) -> None:
    for word in ("raise", "nan"):
        with pytest.raises(RolloutError) as raised:
            await runner.call("Reward", rewards("", word), 60)
        error = raised.value
        assert error.fix and error.place is not None and error.place.file.endswith("plugins.py") and error.place.line


PYTHON_CASES: dict[str, Check] = {errors_have_a_place.__name__: errors_have_a_place}
"""Further cases, of plugins in Python."""


@case
async def errors_have_a_type(runner: Runner) -> None:
    for word, reason, text in (("raise", "REWARD_RAISED", "bad sample"), ("nan", "REWARD_BAD_RESULT", "nan")):
        with pytest.raises(RolloutError) as raised:
            await runner.call("Reward", rewards("", word), 60)
        error = raised.value
        assert error.reason == reason and text.lower() in error.message.lower()
    assert (await runner.call("Reward", rewards(""), 60)).scores, "a failed call leaves the plugin usable"


@case
async def a_call_ends_at_its_deadline(runner: Runner) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(RolloutError) as raised:
        await runner.call("Reward", rewards("hang"), 0.5)
    assert raised.value.reason == "REWARD_TIMEOUT", raised.value
    assert "took longer than 0.5 s" in raised.value.message
    assert loop.time() - began < 2.5
    assert (await runner.call("Reward", rewards(""), 60)).scores, "a late call leaves the plugin usable"


@case
async def the_handshake_names_the_plugins(runner: Runner) -> None:
    answer = await runner.call("Handshake", pb.HandshakeRequest(schema_version=wire.SCHEMA_VERSION), 10)
    assert answer.schema_version == wire.SCHEMA_VERSION
    infos = {(info.kind, info.name): info for info in answer.plugins}
    assert {(pb.PLUGIN_KIND_REWARD, "score"), (pb.PLUGIN_KIND_EVALUATION, "slow")} < set(infos)
    assert infos[pb.PLUGIN_KIND_TOOL, "add"].description == "Add two numbers."
    assert infos[pb.PLUGIN_KIND_ENVIRONMENT, "Echo"].saves_state
    with pytest.raises(RolloutError) as raised:
        await runner.call("Handshake", pb.HandshakeRequest(schema_version=wire.SCHEMA_VERSION + 1), 10)
    assert raised.value.reason == "PLUGIN_SCHEMA"


@case
async def an_unknown_plugin_is_refused(runner: Runner) -> None:
    request = rewards("")
    request.plugin = "another"
    with pytest.raises(RolloutError) as raised:
        await runner.call("Reward", request, 10)
    assert raised.value.reason == "PLUGIN_UNKNOWN" and "score" in raised.value.fix


@case
async def an_evaluation_scores_and_sums_up(runner: Runner) -> None:
    request = pb.EvaluateRequest(groups=rewards("").groups)
    answer = await runner.call("Evaluate", request, 60)
    assert [score.reward for score in answer.scores] == [1.0, 1.0] and dict(answer.metrics) == {"score": 1.0}


@case
async def a_tool_answers_each_call(runner: Runner) -> None:
    calls = [
        pb.ToolCall(tool="add", call_id=str(n), arguments_json=text) for n, text in enumerate(('{"a": 1, "b": 2}', '{"a": 1}'))
    ]
    good, bad = (await runner.call("CallTool", pb.CallToolRequest(calls=calls), 60)).results
    assert (good.call_id, good.content, good.reason) == ("0", "3", "")
    assert (bad.call_id, bad.reason, bad.infrastructure) == ("1", "TOOL_RAISED", False) and "missing" in bad.content


@case
async def rows_are_read_by_index(runner: Runner) -> None:
    async def read(offset: int, limit: int, split: str = "train") -> tuple[list[int], bool]:
        request = pb.ReadRowsRequest(plugin="numbers", split=split, offset=offset, limit=limit)
        answer = await runner.call("ReadRows", request, 60)
        return [json.loads(row)["number"] for row in answer.rows_json], answer.end

    assert await read(0, 3) == ([0, 1, 2], False)
    assert await read(3, 3) == ([3, 4], True)
    assert await read(1, 2) == ([1, 2], False), "an earlier index again"
    assert await read(4, 9) == ([4], True) and await read(9, 2) == ([], True)
    with pytest.raises(RolloutError) as raised:
        await read(0, 1, "raise")
    assert raised.value.reason == "DATA_SOURCE_RAISED" and "no such split" in raised.value.message


@case
async def an_environment_runs_episodes(runner: Runner) -> None:
    task, bad = Task("t", b"{}", (0, 2), (7, 8), 3), Task("bad", b"[]", (0,), (1,))
    request = pb.ResetEnvironmentRequest(tasks=[wire.task_to(each) for each in (task, bad)])
    first, refused = map(wire.start_from, (await runner.call("ResetEnvironment", request, 60)).starts)
    assert isinstance(first, Observation) and first.text == "t" and first.token_ids.tolist() == [3]
    assert refused == Refusal("ROW_INVALID", "not an object")

    async def step(text: str, truncated: bool = False) -> Answer:
        turn = Turn(task, 2, 0, "t", np.array([1], np.int32), text, truncated, first.token_ids)
        [answer] = (await runner.call("StepEnvironment", pb.StepEnvironmentRequest(turns=[wire.turn_to(turn)]), 60)).answers
        return wire.answer_from(answer)

    second = await step("on")
    assert isinstance(second, Observation) and second.text == "on" and second.token_ids.tolist() == [1]
    state = (await runner.call("SaveEnvironment", pb.SaveEnvironmentRequest(), 60)).state
    assert await step("stop", True) == Result(2.0, {"sample": 2.0}, "truncated")
    await runner.call("LoadEnvironment", pb.LoadEnvironmentRequest(state=state), 60)
    assert await step("stop") == Result(2.0, {"sample": 2.0})
    await runner.call("LoadEnvironment", pb.LoadEnvironmentRequest(state=state), 60)
    with pytest.raises(RolloutError) as raised:
        await step("fail")
    assert raised.value.reason == "ENVIRONMENT_FAILED" and "the simulator is down" in raised.value.message
    for _ in range(2):
        await runner.call("CloseEnvironment", pb.CloseEnvironmentRequest(episodes=[pb.EpisodeKey(task="t", sample=2)]), 60)
