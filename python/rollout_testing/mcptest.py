"""The suite of MCP servers: what the environment ``mcp`` makes of a server that behaves, whichever
package or protocol version it has. A test class derives from ``McpSuite`` and has ``command``, a
server with these tools over ``{"bali": "moru", "kepo": "tasi"}``:

    lookup(country)  the capital, or the tool's own error
    count()          how often this process was called
    table()          everything, as structured content
    picture()        an image
    sleep(seconds)   waits
    leave()          ends the process with code 7
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from rollout.environment import Observation, Refusal, Result, Task, ToolCall, Turn
from rollout.environments.mcp_tools import McpTools

TOOLS = ["lookup", "count", "table", "picture", "sleep", "leave"]


@asynccontextmanager
async def opened(seconds: float = 30.0, **servers: Any) -> AsyncGenerator[McpTools]:
    """The environment with these tables of ``[environment.args.servers]``, shut down on exit."""
    environment = McpTools({"servers": servers}, ".", seconds)
    try:
        yield environment
    finally:
        await environment.shutdown()


async def begin(environment: McpTools, key: str = "t") -> Observation:
    """Begin the episodes of a task with two samples."""
    [first] = await environment.reset([Task(key, b"{}", (0, 1), (0, 1))])
    assert not isinstance(first, Refusal), first.message
    return first


async def call(environment: McpTools, tool: str, sample: int = 0, key: str = "t", **arguments: Any) -> str | Result:
    """The text that the policy reads after one call, or the failed episode."""
    task = Task(key, b"{}", (0, 1), (0, 1))
    turn = Turn(task, sample, 0, "", np.zeros(1, np.int32), "", False, tool_calls=(ToolCall("c", tool, arguments),))
    [answer] = await environment.step([turn])
    if isinstance(answer, Result):
        assert answer.outcome == "infra_failed"
        return answer
    [message] = answer.messages
    assert (message["role"], message["tool_call_id"], message["name"]) == ("tool", "c", tool)
    return ("error: " if answer.metrics["tools/errors"] else "") + message["content"]


def failure(answer: str | Result) -> str:
    """Reason and message of a failed episode."""
    assert isinstance(answer, Result), answer
    return f"{answer.reason}: {answer.message}"


class McpSuite:
    """The tests. command: of the server."""

    command: Sequence[str]

    def server(self, **keys: Any) -> dict[str, Any]:
        """The table of the server."""
        return {"command": list(self.command), "start_seconds": 120, **keys}

    async def test_results_and_errors_of_tools_are_what_the_policy_reads(self) -> None:
        async with opened(capitals=self.server()) as environment:
            first = await begin(environment)
            assert [tool["function"]["name"] for tool in first.tools] == TOOLS
            schema = first.tools[0]["function"]["parameters"]
            assert schema["properties"]["country"]["type"] == "string" and schema["required"] == ["country"]
            assert await call(environment, "lookup", country="bali") == "moru"
            assert "unknown country oslo" in str(await call(environment, "lookup", country="oslo"))
            assert str(await call(environment, "lookup", country="oslo")).startswith("error: ")
            assert str(await call(environment, "lookup")).startswith("error: ")
            assert json.loads(str(await call(environment, "table"))) == {"bali": "moru", "kepo": "tasi"}
            assert await call(environment, "find") == f"error: unknown tool `find`; the tools are: {', '.join(TOOLS)}"
            said = failure(await call(environment, "picture"))
            assert said.startswith(
                "TOOL_BAD_RESULT: the tool `picture` of the MCP server `capitals` returned content of the type image/png"
            )

    async def test_a_server_serves_all_episodes_or_one(self) -> None:
        shared, own = self.server(allow=["count"]), self.server(allow=["count"], per="episode")
        async with opened(shared=shared) as environment:
            await begin(environment)
            assert [await call(environment, "count", sample) for sample in (0, 1, 0)] == ["1", "2", "3"]
        async with opened(own=own) as environment:
            await begin(environment)
            assert [await call(environment, "count", sample) for sample in (0, 1, 0)] == ["1", "1", "2"]
            await environment.close([("t", 0)])
            assert await call(environment, "count", 0) == "1"

    async def test_allowed_and_denied_tools(self) -> None:
        async with opened(capitals=self.server(allow=["lookup", "count"], deny=["count"])) as environment:
            [refused] = await environment.reset([Task("t", b"{}", (0,), (0,))])
            assert isinstance(refused, Refusal) and refused.reason == "ENVIRONMENT_ARGUMENT"
            assert "offers no tool `count`, which `allow` names; it offers: lookup" in refused.message
        async with opened(capitals=self.server(deny=["leave", "sleep"])) as environment:
            assert [tool["function"]["name"] for tool in (await begin(environment)).tools] == TOOLS[:4]
            assert str(await call(environment, "leave")).startswith("error: unknown tool `leave`")

    async def test_a_hung_call_is_canceled_and_the_next_episode_works(self) -> None:
        async with opened(1.0, capitals=self.server()) as environment:
            await begin(environment)
            said = failure(await call(environment, "sleep", seconds=600))
            assert said == "TOOL_TIMEOUT: the tool `sleep` of the MCP server `capitals` took longer than 1 s"
        async with opened(60.0, capitals=self.server()) as environment:
            await begin(environment)
            assert await call(environment, "lookup", country="kepo") == "tasi"

    async def test_a_server_that_ends_fails_its_episodes_and_is_restarted_for_the_next(self) -> None:
        async with opened(capitals=self.server()) as environment:
            await begin(environment)
            assert await call(environment, "count", 1) == "1"
            said = failure(await call(environment, "leave", 0))
            assert said.startswith("MCP_SERVER_FAILED: the MCP server `capitals` ended (exit code 7") and "`leave`" in said
            said = failure(await call(environment, "count", 1))
            assert said == "MCP_SERVER_FAILED: the MCP server `capitals` that this episode used has ended"
            await begin(environment, "next")
            assert await call(environment, "count", 0, "next") == "1"
