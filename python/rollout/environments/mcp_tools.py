"""The tools of MCP servers (``environment.kind = "mcp"``). The worker asks for the prompt and
scores the answer; this environment has the connections to the servers, and makes the calls."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, cast

from rollout.environment import Observation, Refusal, Result, Task, ToolCall, Turn
from rollout.environments import ArgumentInvalid
from rollout.environments.mcp_server import Server, ServerFailed, Settings, Tool, package
from rollout.errors import RolloutError
from rollout.tools import Key, ToolError, answered, unknown_tool


class ToolsChanged(RolloutError):
    """The tools of a server differ from those of the plan."""

    reason: ClassVar[str] = "ENVIRONMENT_CHANGED"


def settings_of(args: Mapping[str, Any]) -> dict[str, Settings]:
    """The servers of ``[environment.args]`` by name. Raises ``ArgumentInvalid``."""
    if unknown := sorted(set(args) - {"servers"}):
        raise ArgumentInvalid(f"`environment.args.{unknown[0]}` is unknown", fix="the only argument of mcp is: servers")
    servers: Any = args.get("servers")
    if not isinstance(servers, dict) or not servers:
        raise ArgumentInvalid(
            "`environment.args.servers` names no server",
            fix='write for example `args.servers.capitals = { command = ["python", "capitals.py"] }`',
        )
    return {name: Settings.read(name, table) for name, table in sorted(cast("dict[str, Any]", servers).items())}


class McpTools:
    """The calls of all episodes. Servers with ``per = "episode"`` start with the first call of an
    episode and end with it; the others serve all episodes.

    An episode whose server has ended fails, and the next one gets another server. Each server that
    is started must have the tools of the plan.
    """

    batched = False

    def __init__(
        self,
        args: Mapping[str, Any],
        base_dir: str = ".",
        seconds: float = 30.0,
        pinned: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """args: ``[environment.args]``. base_dir: folder in which servers start. seconds: longest
        time of a call. pinned: of each server, the digests of its tools by name; None: any
        tools."""
        self._settings = settings_of(args)
        package()  # it takes a while to import, which does not count as start of a server
        self._base_dir, self._seconds, self._pinned = base_dir, seconds, pinned
        self._ready: dict[str, Server] = {}  # shared, or started for the next episode
        self._locks = {name: asyncio.Lock() for name in self._settings}
        self._of: dict[tuple[Key, str], Server] = {}  # that an episode has called
        self._server_of: dict[str, str] = {}  # of each tool
        self._background: set[asyncio.Task[None]] = set()

    async def tools(self) -> list[Tool]:
        """The tools of all servers, started if needed. Raises ``RolloutError``, also if two have
        the same name or they differ from the plan."""
        lists = await asyncio.gather(*(self._listed(name) for name in self._settings))
        found = [tool for tools in lists for tool in tools]
        of: dict[str, str] = {}
        for tool in found:
            if tool.name in of:
                raise ArgumentInvalid(
                    f"the MCP servers `{of[tool.name]}` and `{tool.server}` both have a tool `{tool.name}`",
                    fix=f'write `deny = ["{tool.name}"]` at one of them',
                )
            of[tool.name] = tool.server
        self._server_of = of
        return found

    async def reset(self, tasks: Sequence[Task]) -> list[Observation | Refusal]:
        """The tools. The worker adds the prompt."""
        try:
            schemas = tuple(tool.schema for tool in await self.tools())
        except RolloutError as error:
            return [Refusal(error.reason, str(error))] * len(tasks)
        return [Observation(messages=({"role": "user", "content": ""},), tools=schemas)] * len(tasks)

    async def step(self, turns: Sequence[Turn]) -> list[Observation | Result]:
        """The results of the calls of each turn."""
        return [await self._step(turn) for turn in turns]

    async def close(self, episodes: Sequence[Key]) -> None:
        """End the servers of these episodes."""
        for episode in episodes:
            for name, settings in self._settings.items():
                server = self._of.pop((episode, name), None)
                if server is not None and settings.per_episode:
                    self._later(server.close())

    async def shutdown(self) -> None:
        """End all servers."""
        servers = {*self._ready.values(), *self._of.values()}
        self._ready, self._of = {}, {}
        await asyncio.gather(*(server.close() for server in servers), *self._background)

    async def _step(self, turn: Turn) -> Observation | Result:
        episode = turn.task.key, turn.sample
        answer = await answered(turn, partial(self._call, episode))
        if isinstance(answer, Result):
            await self.close([episode])
        return answer

    async def _call(self, episode: Key, call: ToolCall) -> tuple[str, bool]:
        name = self._server_of.get(call.name)
        if name is None:
            raise ToolError(unknown_tool(call.name, self._server_of))
        server = await self._server(episode, name)
        return await server.call(call.name, call.arguments, self._seconds)

    async def _server(self, episode: Key, name: str) -> Server:
        """The server for a call of an episode."""
        async with self._locks[name]:
            current = self._ready.get(name)
            used = self._of.get((episode, name))
            if used is not None:
                if used.broken:
                    raise ServerFailed(f"the MCP server `{name}` that this episode used has ended")
                return used
            if current is None or current.broken:
                current, _ = await self._started(name)
            self._of[episode, name] = current
            if self._settings[name].per_episode:
                del self._ready[name]
            return current

    async def _listed(self, name: str) -> list[Tool]:
        """The tools of a server, checked."""
        async with self._locks[name]:
            current = self._ready.get(name)
            if current is None or current.broken:
                return (await self._started(name))[1]
            return self._checked(name, await current.tools())

    async def _started(self, name: str) -> tuple[Server, list[Tool]]:
        """Start a server and check its tools."""
        if (old := self._ready.pop(name, None)) is not None:
            self._later(old.close())
        server = Server(self._settings[name], self._base_dir)
        await server.open()
        try:
            tools = self._checked(name, await server.tools())
        except BaseException:
            self._later(server.close())
            raise
        self._ready[name] = server
        return server, tools

    def _checked(self, name: str, tools: list[Tool]) -> list[Tool]:
        """The tools. Raises ``ToolsChanged``, and when a run is planned ``ArgumentInvalid``."""
        names = {tool.name: tool.digest for tool in tools}
        if self._pinned is not None:
            self._compare(name, names, self._pinned.get(name, {}))
            return tools
        if missing := [tool for tool in self._settings[name].allow if tool not in names]:
            raise ArgumentInvalid(
                f"the MCP server `{name}` offers no tool `{missing[0]}`, which `allow` names",
                fix=f"it offers: {', '.join(names) or 'none'}; correct `environment.args.servers.{name}.allow`",
            )
        if not tools:
            raise ArgumentInvalid(f"the MCP server `{name}` offers no tools", fix="correct its `deny`, or remove the server")
        return tools

    def _compare(self, name: str, found: Mapping[str, str], planned: Mapping[str, str]) -> None:
        """Raise ``ToolsChanged`` if tools differ. found, planned: digests by name."""
        changes = [f"`{tool}` is new" for tool in found if tool not in planned]
        changes += [f"`{tool}` is missing" for tool in planned if tool not in found]
        changes += [
            f"`{tool}` has another description or schema" for tool in found if planned.get(tool) not in (None, found[tool])
        ]
        if changes:
            raise ToolsChanged(
                f"the tools of the MCP server `{name}` have changed since the run was planned: {', '.join(changes)}",
                fix="restore the server and resume the run, or start a new run with the changed tools",
            )

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
