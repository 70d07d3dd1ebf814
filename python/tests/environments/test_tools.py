"""Tools of an episode: functions of files, the sandboxed ones, and mistakes of the policy."""

from __future__ import annotations

import asyncio
import json
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from rollout.environment import Observation, Result, Task, ToolCall, Turn
from rollout.plugin.schema import ToolInvalid, function_schema
from rollout.sandbox import Sandbox
from rollout.tools import Boxed, Fetch, Search, ToolError, ToolsInvalid, named_tools
from rollout_testing.daemon import sandbox_binary
from rollout_workers.environments.tools import Functions, Tools

CALCULATOR = '''
import os, time

def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    a: the first
    """
    return a + b

def sleep(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "awake"

def leave() -> None:
    """End the process."""
    os._exit(3)
'''


class Scored:
    """Scores an answer by its length."""

    async def step(self, turns: list[Turn]) -> list[Result]:
        return [Result(reward=float(len(turn.text))) for turn in turns]


class Prompts:
    def messages(self, row_json: bytes) -> list[dict[str, Any]]:
        return [{"role": "user", "content": json.loads(row_json)["prompt"]}]


TASK = Task("t", b'{"prompt": "2+2"}', (0, 1), (5, 6))


def turn(*calls: ToolCall, content: str = "", sample: int = 0) -> Turn:
    return Turn(TASK, sample, 0, "", np.zeros(1, np.int32), content, False, content=content, tool_calls=calls)


@pytest.fixture
async def tools(tmp_path: Path):
    (tmp_path / "calculator.py").write_text(CALCULATOR)
    files = [f"calculator.py:{name}" for name in ("add", "sleep", "leave")]
    environment = Tools(Scored(), Prompts(), [Functions(files, str(tmp_path), 2.0)])  # type: ignore[arg-type]
    await environment.start()
    yield environment
    await environment.shutdown()


async def test_calls_of_a_turn_give_messages_and_an_answer_without_a_call_is_scored(tools: Tools) -> None:
    [first] = await tools.reset([TASK])
    assert isinstance(first, Observation) and [dict(m) for m in first.messages] == [{"role": "user", "content": "2+2"}]
    assert [tool["function"]["name"] for tool in first.tools] == ["add", "sleep", "leave"]
    assert first.tools[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {"a": {"type": "integer", "description": "the first"}, "b": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    [answer] = await tools.step([turn(ToolCall("c1", "add", {"a": 2, "b": 2}), ToolCall("c2", "add", {"a": 2}))])
    assert isinstance(answer, Observation) and answer.metrics == {"tools/calls": 2.0, "tools/errors": 0.0}
    assert [(m["role"], m["tool_call_id"], m["content"]) for m in answer.messages] == [("tool", "c1", "4"), ("tool", "c2", "3")]
    [result] = await tools.step([turn(content="four")])
    assert isinstance(result, Result) and result.reward == 4.0


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (ToolCall("c", "multiply", {}), "unknown tool `multiply`; the tools are: add, sleep, leave"),
        (ToolCall("c", "add", {"b": 1}), "TypeError: add() missing 1 required positional argument: 'a'"),
        (ToolCall("c", "add", error="the arguments are not JSON: x", raw="x"), "the arguments are not JSON: x"),
    ],
)
async def test_a_mistake_of_the_policy_is_a_result_that_it_reads(tools: Tools, call: ToolCall, said: str) -> None:
    [answer] = await tools.step([turn(call)])
    assert isinstance(answer, Observation) and answer.messages[0]["content"] == said
    assert answer.metrics["tools/errors"] == 1.0


@pytest.mark.parametrize(
    ("call", "reason", "said"),
    [
        (ToolCall("c", "sleep", {"seconds": 60.0}), "TOOL_TIMEOUT", "the tool `sleep` took longer than 2 s"),
        (
            ToolCall("c", "leave", {}),
            "PLUGIN_UNAVAILABLE",
            "the plugin's CallTool ended its process (exit code 3); see the worker's log",
        ),
    ],
)
async def test_a_tool_that_hangs_or_exits_is_no_reward_and_the_next_call_works(
    tools: Tools, call: ToolCall, reason: str, said: str
) -> None:
    [ended] = await tools.step([turn(call)])
    assert isinstance(ended, Result) and (ended.outcome, ended.reason, ended.message) == ("infra_failed", reason, said)
    [answer] = await tools.step([turn(ToolCall("c", "add", {"a": 1}))])
    assert isinstance(answer, Observation) and answer.messages[0]["content"] == "2"


async def test_the_sandboxed_tools_keep_files_and_variables_of_an_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_SANDBOX", sandbox_binary())
    if not (report := Sandbox.probe()).ok:
        pytest.skip(f"this host builds no sandboxes: {report.error}")
    box = Boxed(["python", "bash", "edit"], 5.0, warm=1)
    one, two = ("t", 0), ("t", 1)

    async def call(episode: tuple[str, int], tool: str, **arguments: str) -> str:
        try:
            return await box.call(episode, ToolCall("c", tool, arguments))
        except ToolError as error:
            return f"error: {error}"

    await box.start()
    try:
        assert await call(one, "python", code="x = 6\nprint('set')") == "set"
        assert await call(one, "python", code="x * 7") == "42"
        assert "NameError: name 'x' is not defined" in await call(two, "python", code="x")
        assert await call(one, "edit", path="a.txt", old="", new="one\ntwo\n") == "wrote a.txt: 2 lines"
        assert await call(one, "edit", path="a.txt", old="two", new="three") == "wrote a.txt: 2 lines"
        assert "the text in `old` occurs 0 times in a.txt" in await call(one, "edit", path="a.txt", old="nine", new="")
        assert await call(one, "bash", command="cat a.txt; exit 3") == "one\nthree\n[exit code 3]"
        assert await call(two, "bash", command="cat a.txt") == "cat: a.txt: No such file or directory\n[exit code 1]"
        assert await call(one, "python", code="import os; os.system('echo sub')") == "sub\n0"
        assert "longer than 5 s; the next call begins with a new interpreter" in await call(
            one, "python", code="while True: pass"
        )
        assert await call(one, "python", code="open('a.txt').read()") == "'one\\nthree\\n'"
    finally:
        await box.close(one)
        await box.close(two)
        await box.shutdown()


async def test_an_answer_that_no_call_waits_for_is_not_that_of_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_SANDBOX", sandbox_binary())
    if not (report := Sandbox.probe()).ok:
        pytest.skip(f"this host builds no sandboxes: {report.error}")
    box = Boxed(["python"], 20.0, warm=0)

    async def python(code: str) -> str:
        return await box.call(("t", 0), ToolCall("c", "python", {"code": code}))

    forge = """
import os, json
for fd in range(3, 20):
    try: os.write(fd, b'"late"\\n[0, "late"]\\n{}\\n')
    except OSError: pass
"""
    await box.start()
    try:
        assert await python("1 + 1") == "2"
        late = asyncio.create_task(python("import time; time.sleep(0.5); 'late'"))
        await asyncio.sleep(0.2)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        assert await python("'next'") == "'next'"
        await python(forge)
        assert await python("'after'") == "'after'"
    finally:
        await box.shutdown()


async def test_search_finds_lines_and_fetch_asks_listed_hosts_only(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("The moon is far.\nThe sun is far and hot.\n")
    search = Search(str(tmp_path), 5.0)
    assert await search.call(("t", 0), ToolCall("c", "search", {"query": "hot sun"})) == "a.md:2: The sun is far and hot."
    assert await search.call(("t", 0), ToolCall("c", "search", {"query": "mars"})) == "nothing found"
    with pytest.raises(ToolError, match=r"allowed are example\.org"):
        await Fetch(["example.org"], 5.0).call(("t", 0), ToolCall("c", "fetch", {"url": "http://169.254.169.254/latest"}))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({}, "`environment.args.tools` names no tools"),
        ({"tools": ["pyton"]}, "unknown tool `pyton`"),
        ({"tools": ["search"]}, "the tool `search` needs `environment.args.search`"),
        ({"tools": ["bash"], "timeout": 3}, "`environment.args.timeout` is unknown"),
    ],
)
def test_wrong_arguments_are_named(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ToolsInvalid) as caught:
        named_tools(args)
    assert caught.value.message == said and caught.value.fix


def test_a_function_without_types_or_docstring_is_no_tool() -> None:
    def plain(x: int) -> int:
        return x

    def untyped(x):  # type: ignore[no-untyped-def]
        """Say."""
        return x

    def counted(x: Fraction) -> Fraction:
        """Say."""
        return x

    def typed(kind: Literal["a", "b"], sizes: list[int] | None = None) -> None:
        """Say."""

    with pytest.raises(ToolInvalid, match="has no docstring"):
        function_schema(plain)
    with pytest.raises(ToolInvalid, match="has no type"):
        function_schema(untyped)
    with pytest.raises(ToolInvalid, match="`x` of the tool `counted` has the type Fraction, which"):
        function_schema(counted)
    assert function_schema(typed)["function"]["parameters"]["properties"] == {
        "kind": {"enum": ["a", "b"]},
        "sizes": {"type": "array", "items": {"type": "integer"}},
    }
