"""Environments and tools of sidecars, as workers and plans use them: the Go example."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.environment import Observation, Refusal, Result, Task, ToolCall, Turn
from rollout.errors import RolloutError
from rollout.hosting.manifest import read_manifest
from rollout.hosting.supervised import SupervisedSidecar
from rollout.probe.episode import dry_episode
from rollout.probe.reward import dry_call
from rollout.tools import ToolError
from rollout_testing.go import go_program
from rollout_workers.environments.hosted import Hosted
from rollout_workers.environments.tools import SidecarTool, toolboxes

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "plugins" / "go"


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """A copy of the example with its program."""
    for file in EXAMPLE.glob("*.*"):
        shutil.copy(file, tmp_path)
    shutil.copy(go_program("words"), tmp_path / "words")
    return tmp_path


@pytest.fixture
async def guess(example: Path) -> AsyncIterator[tuple[Hosted, SupervisedSidecar]]:
    sidecar = SupervisedSidecar(read_manifest("guess.toml:guess", example, kind="environment"), args='{"guesses": 4}')
    environment = Hosted({"kind": "environment", "plugin": "guess.toml:guess"}, sidecar=sidecar)
    await environment.start()
    yield environment, sidecar
    await environment.shutdown()


def task(number: int = 4) -> Task:
    return Task("t", json.dumps({"number": number}).encode(), (0, 1), (5, 6), 0)


def turn(number: int, text: str, sample: int = 0) -> Turn:
    return Turn(task(), sample, number, "", np.zeros(1, np.int32), text, False, content=text)


async def test_episodes_are_played_with_arguments(guess: tuple[Hosted, SupervisedSidecar]) -> None:
    environment, _ = guess
    assert environment.saves_episodes and not environment.batched
    assert [start.text for start in await environment.reset([task()]) if isinstance(start, Observation)] == ["guess 1-5:"]
    said = [(await environment.step([turn(n, text)]))[0] for n, text in enumerate(("1", "5", "4"))]
    assert [each.text if isinstance(each, Observation) else each for each in said] == [
        "higher:",
        "lower:",
        Result(1.0, {"guesses": 3.0}),
    ]
    [refused] = await environment.reset([Task("u", b"{}", (0,), (1,), 1)])
    assert refused == Refusal("ROW_INVALID", "the row has no number")


async def test_episodes_of_a_killed_process_fail_with_a_reason_and_saved_ones_continue(
    guess: tuple[Hosted, SupervisedSidecar],
) -> None:
    environment, sidecar = guess
    await environment.reset([task()])
    await environment.step([turn(0, "1")])
    state = environment.saved("t", 0)
    assert json.loads(state) == {"guesses": 4, "number": 4}
    os.kill(sidecar.pid, signal.SIGKILL)
    [lost] = await environment.step([turn(1, "5", 1)])
    assert isinstance(lost, Result) and (lost.outcome, lost.reason) == ("infra_failed", "ENVIRONMENT_EXITED")
    await environment.add("t", {0: state})
    assert await environment.step([turn(1, "4")]) == [Result(1.0, {"guesses": 2.0})]


async def test_a_tool_answers_and_is_not_called_twice(example: Path) -> None:
    [tool] = toolboxes({"tools": ["add.toml:add"]}, str(example), 10.0, "python")
    assert isinstance(tool, SidecarTool)
    await tool.start()
    try:
        [schema] = tool.schemas
        assert schema["function"]["name"] == "add" and schema["function"]["parameters"]["required"] == ["a", "b"]

        async def call(**arguments: Any) -> str:
            return await tool.call(("t", 0), ToolCall("1", "add", arguments, "", ""))

        assert await call(a=2, b=3) == "5"
        with pytest.raises(ToolError, match='missing argument "b"'):
            await call(a=2)
        assert await asyncio.gather(*(call(a=n, b=n) for n in range(20))) == [str(2 * n) for n in range(20)]
    finally:
        await tool.shutdown()


def test_a_plan_calls_each_kind_once_and_pins_its_files(example: Path) -> None:
    def files(answer: dict[str, Any]) -> list[str]:
        return sorted(Path(file).name for file in answer["files"])

    def fails(error: RolloutError) -> None:
        raise AssertionError(error)

    calls: list[str] = []
    common = {"base_dir": str(example), "timeout_seconds": 20.0}
    samples = [{"prompt": "1+1=", "completion": "a2", "row": {}}, {"prompt": "1+1=", "completion": "", "row": {}}]
    reward = dry_call({**common, "plugin": "digits.toml:digits", "samples": samples}, fails, lambda: calls.append("reward"))
    assert [score["reward"] for score in reward["scores"]] == [0.5, 0.0] and not reward["parts"]
    assert files(reward) == ["digits.toml", "main.go", "words"]
    rows = [{"number": 3}]
    played = dry_episode({**common, "plugin": "guess.toml:guess", "rows": rows}, fails, lambda: calls.append("environment"))
    assert files(played) == ["guess.toml", "main.go", "words"] and played["saves_episodes"]
    tools = {**common, "kind": "tools", "plugin": "", "args": '{"tools": ["add.toml:add"]}'}
    assert files(dry_episode(tools, fails, lambda: calls.append("tools"))) == ["add.toml", "main.go", "words"]
    assert calls == ["reward", "environment", "tools"]
    with pytest.raises(RolloutError, match="refused training row 1: the row has no number"):
        dry_episode({**common, "plugin": "guess.toml:guess", "rows": [{}]}, fails, lambda: None)
    with pytest.raises(RolloutError, match="of the kind environment, but the configuration uses it as reward"):
        dry_call({**common, "plugin": "guess.toml:guess", "samples": samples}, fails, lambda: None)
