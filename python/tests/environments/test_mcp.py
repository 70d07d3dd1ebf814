"""Tools of MCP servers: the suite on a server without a package, servers that misbehave, changed
tools, and the worker's side."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.environment import Observation, Refusal, Result, Task, ToolCall, Turn
from rollout.environments import ArgumentInvalid, source
from rollout.environments.mcp_tools import McpTools, settings_of
from rollout.plan.v1.plan_pb2 import Tool
from rollout.waiting import Why, why
from rollout_testing.mcptest import McpSuite, begin, call, failure, opened
from rollout_workers.environments.hosted import Hosted
from rollout_workers.environments.mcp import McpTools as McpEnvironment
from rollout_workers.environments.mcp import digests

DOUBLE = [sys.executable, "-S", str(Path(__file__).parent / "mcp_double.py")]
TASK = Task("t", b"{}", (0, 1), (0, 1))


class TestDouble(McpSuite):
    command = DOUBLE


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["no-such-program"], "the MCP server `bad` can't be started: no-such-program: No such file or directory"),
        ([*DOUBLE, "--trouble", "exit"], "the MCP server `bad` ended (exit code 3: no table here) (starting it)"),
        ([*DOUBLE, "--trouble", "hang"], "the MCP server `bad` did not answer within 2 s of its start"),
        (
            [*DOUBLE, "--trouble", "text"],
            "the MCP server `bad` wrote a line to its output that is not a message of the protocol: 'Welcome to the capitals!'",
        ),
    ],
    ids=["wrong command", "exits", "hangs", "text in its output"],
)
async def test_a_server_that_does_not_start_refuses_the_task(command: list[str], said: str) -> None:
    seconds = 2 if "hang" in command else 120
    async with opened(bad={"command": command, "start_seconds": seconds}) as environment:
        [refused] = await environment.reset([TASK])
        assert isinstance(refused, Refusal) and refused.reason == "MCP_SERVER_FAILED"
        assert refused.message.startswith(said), refused.message


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("junk", 'the MCP server `bad` wrote a line to its output that is not a message of the protocol: \'{"jsonrpc"'),
        ("large", "the MCP server `bad` wrote a message of more than 16 MiB (calling `lookup`)"),
    ],
    ids=["bad JSON", "20 MB"],
)
async def test_a_server_that_breaks_the_protocol_fails_the_episode(trouble: str, said: str) -> None:
    async with opened(bad={"command": [*DOUBLE, "--trouble", trouble]}) as environment:
        await begin(environment)
        assert failure(await call(environment, "lookup", country="bali")).startswith(f"MCP_SERVER_FAILED: {said}")
        await begin(environment)  # another server


async def test_a_long_result_is_shortened() -> None:
    async with opened(long={"command": [*DOUBLE, "--trouble", "long"]}) as environment:
        await begin(environment)
        text = str(await call(environment, "lookup", country="bali"))
        assert len(text) < 16_100 and "[84000 characters left out]" in text


async def test_a_timeout_cancels_the_call_at_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANCELLED", str(tmp_path / "log"))
    monkeypatch.setenv("SECRET", "x")
    async with opened(0.5, slow={"command": DOUBLE, "env": ["CANCELLED"]}) as environment:
        await begin(environment)
        assert failure(await call(environment, "sleep", seconds=600)).startswith("TOOL_TIMEOUT")
        assert await call(environment, "count", 1) == "2"  # the server answers others, and was not replaced
    assert json.loads((tmp_path / "log").read_text())["method"] == "notifications/cancelled"


async def test_a_call_without_an_answer_is_described() -> None:
    async with opened(60, slow={"command": DOUBLE}) as environment:
        await begin(environment)
        calling = asyncio.create_task(call(environment, "sleep", seconds=600))
        found: list[Why] = []
        while not found:
            await asyncio.sleep(0.01)
            found = [reason for task in asyncio.all_tasks() if (reason := why(task)) is not None]
        pid = found[0].process
        assert found[0].text == f"waits for the tool `sleep` of the MCP server `slow` (process {pid})" and pid
        assert f"process {pid}" in found[0].fix
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        assert not [task for task in asyncio.all_tasks() if why(task)]


@pytest.mark.parametrize(
    ("flags", "change"),
    [
        (["--tools", "more"], "`delete` is new"),
        (["--tools", "fewer"], "`count` is missing"),
        (["--tools", "other"], "`lookup` has another description or schema"),
        (["--trouble", "change"], "`count` is missing"),
    ],
)
async def test_changed_tools_end_the_run(flags: list[str], change: str) -> None:
    planned = McpTools({"servers": {"capitals": {"command": DOUBLE}}})
    try:
        tools = [Tool(server=t.server, name=t.name, digest=t.digest) for t in await planned.tools()]
    finally:
        await planned.shutdown()
    args: dict[str, Any] = {"servers": {"capitals": {"command": [*DOUBLE, *flags]}}}
    environment = McpTools(args, pinned=digests(tools))
    try:
        if "change" in flags:  # while the server runs
            await begin(environment)
            await call(environment, "lookup", country="bali")
        [refused] = await environment.reset([TASK])
    finally:
        await environment.shutdown()
    assert isinstance(refused, Refusal) and refused.reason == "ENVIRONMENT_CHANGED"
    said = "the tools of the MCP server `capitals` have changed since the run was planned: "
    assert refused.message.startswith(said + change)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({}, "`environment.args.servers` names no server"),
        ({"server": {}}, "`environment.args.server` is unknown"),
        ({"servers": {"a": {}}}, "`environment.args.servers.a` needs either `command` or `url`"),
        ({"servers": {"a": {"command": "python a.py"}}}, "has `command = 'python a.py'`, not a list of texts"),
        ({"servers": {"a": {"command": ["a"], "timeout": 1}}}, "has the unknown key `timeout`"),
        ({"servers": {"a": {"command": ["a"], "per": "call"}}}, "has `per = 'call'`"),
        ({"servers": {"a": {"command": ["a"], "env": ["NO_SUCH"]}}}, "needs the environment variable NO_SUCH, which is not set"),
        ({"servers": {"a": {"url": "http://example.org/mcp"}}}, "is on the host example.org"),
        ({"servers": {"a": {"url": "ftp://127.0.0.1"}}}, "has `url = 'ftp://127.0.0.1'`"),
    ],
)
def test_wrong_arguments_are_named(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentInvalid) as caught:
        settings_of(args)
    assert said in caught.value.message and caught.value.fix


def test_other_hosts_need_a_word() -> None:
    assert settings_of({"servers": {"a": {"url": "https://example.org/mcp", "remote": True}}})["a"].remote
    assert settings_of({"servers": {"a": {"url": "http://[::1]:8000/mcp"}}})["a"].url


async def test_two_servers_with_a_tool_of_the_same_name_are_refused() -> None:
    async with opened(a={"command": DOUBLE}, b={"command": DOUBLE}) as environment:
        [refused] = await environment.reset([TASK])
        assert isinstance(refused, Refusal) and "`a` and `b` both have a tool `lookup`" in refused.message


async def test_a_server_at_an_address() -> None:
    process = await asyncio.create_subprocess_exec(*DOUBLE, "--http", stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        port = int(await process.stdout.readline())
        async with opened(capitals={"url": f"http://127.0.0.1:{port}/mcp"}) as environment:
            await begin(environment)
            assert await call(environment, "lookup", country="bali") == "moru"
            process.kill()
            await process.wait()
            assert failure(await call(environment, "lookup", country="bali")).startswith(
                "MCP_SERVER_FAILED: the MCP server `capitals` failed: "
            )
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


class Scored:
    async def step(self, turns: list[Turn]) -> list[Result]:
        return [Result(reward=float(turn.text == "moru")) for turn in turns]


class Prompts:
    def messages(self, row_json: bytes) -> list[dict[str, Any]]:
        return [{"role": "user", "content": json.loads(row_json)["prompt"]}]


async def test_the_worker_adds_the_prompt_and_scores_the_answer() -> None:
    args = {"args": {"servers": {"capitals": {"command": DOUBLE}}}}
    changes: list[str] = []
    environment = McpEnvironment(
        Scored(), Prompts(), Hosted(source("mcp", "", ".", json.dumps(args)), processes=1), changes.append
    )  # type: ignore[arg-type]
    task = Task("t", b'{"prompt": "bali"}', (0, 1), (0, 1))

    def turn(content: str, *calls: ToolCall) -> Turn:
        return Turn(task, 0, 0, "", np.zeros(1, np.int32), content, False, content=content, tool_calls=calls)

    await environment.start()
    try:
        [first] = await environment.reset([task])
        assert isinstance(first, Observation) and first.messages == ({"role": "user", "content": "bali"},)
        [answer] = await environment.step([turn("", ToolCall("c", "lookup", {"country": "bali"}))])
        assert isinstance(answer, Observation) and answer.messages[0]["content"] == "moru"
        [result] = await environment.step([turn("moru")])
        assert isinstance(result, Result) and result.reward == 1.0
    finally:
        await environment.shutdown()
    assert not changes
