"""The environment of tools: the policy calls functions until it answers without a call, and the
run's reward scores that answer."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rollout.environment import Observation, Refusal, Result, Task, ToolCall, Turn
from rollout.errors import RolloutError
from rollout.hosting.child import ChildProcess
from rollout.hosting.exchange import tool_schema
from rollout.hosting.manifest import is_manifest, read_manifest
from rollout.hosting.supervised import SupervisedSidecar, Verify, unpinned
from rollout.hosting.wire import PluginTimeout
from rollout.plugin.v1 import plugin_pb2 as pb
from rollout.tools import (
    BOXED,
    Boxed,
    Fetch,
    Key,
    Schemas,
    Search,
    Toolbox,
    ToolError,
    ToolsInvalid,
    ToolTimeout,
    answered,
    named_tools,
    shortened,
    unknown_tool,
)
from rollout_workers.data.prompts import PromptInvalid, PromptReader
from rollout_workers.environments.registry import Context
from rollout_workers.environments.single_turn import SingleTurn
from rollout_workers.environments.single_turn import build as build_single_turn
from rollout_workers.worker.calls import Call, Calls

_PROCESSES = min(4, os.cpu_count() or 1)


def build(context: Context) -> Tools:
    """Build the environment for the registry. Raises ``ToolsInvalid``."""
    environment = context.config.environment
    python = os.path.join(context.base_dir, environment.python) if environment.python else sys.executable
    boxes = toolboxes(context.args, context.base_dir, environment.tool_timeout_seconds, python, context.verify, context.calls)
    return Tools(
        build_single_turn(context),
        context.prompts,
        boxes,
        context.verify,
        calls=context.calls,
        seconds=environment.tool_timeout_seconds,
    )


def toolboxes(
    args: Mapping[str, Any],
    base_dir: str,
    seconds: float,
    python: str,
    verify: Verify = unpinned,
    calls: Calls | None = None,
) -> list[Toolbox]:
    """The tools that ``[environment.args]`` names. verify: raises if a file has changed. calls:
    where sidecars are named. Raises ``ToolsInvalid``, ``ManifestError``."""
    files, ours = named_tools(args)
    found: list[Toolbox] = []
    if boxed := [name for name in ours if name in BOXED]:
        found.append(Boxed(boxed, seconds))
    if "search" in ours:
        found.append(Search(os.path.join(base_dir, args["search"]), seconds))
    if "fetch" in ours:
        found.append(Fetch(args["fetch"], seconds))
    sidecars = [name for name in files if is_manifest(name)]
    if functions := [name for name in files if not is_manifest(name)]:
        found.append(Functions(functions, base_dir, seconds, python))
    found.extend(SidecarTool(name, base_dir, seconds, verify, calls) for name in sidecars)
    return found


class Functions:
    """Functions of files, in child processes with one call at a time. A call that takes too long
    ends its process, and the next one there begins another."""

    def __init__(self, files: Sequence[str], base_dir: str, seconds: float, python: str = sys.executable) -> None:
        """files: ``file.py:function`` of each. seconds: longest time of a call."""
        sources = [{"kind": "tool", "plugin": file, "base_dir": base_dir} for file in files]
        self._free: asyncio.Queue[ChildProcess] = asyncio.Queue()
        self._children = [ChildProcess(sources, (python,)) for _ in range(_PROCESSES)]
        self._seconds = seconds
        self.schemas: Schemas = ()

    async def start(self) -> None:
        """Start the processes. Raises ``RolloutError``."""
        handshakes = await asyncio.gather(*(child.start() for child in self._children))
        self.schemas = tuple(
            {
                "type": "function",
                "function": {"name": info.name, "description": info.description, "parameters": json.loads(info.parameters_json)},
            }
            for info in handshakes[0].plugins
        )
        for child in self._children:
            self._free.put_nowait(child)

    async def call(self, episode: Key, call: ToolCall) -> str:
        """The function's result."""
        child = await self._free.get()
        try:
            wanted = pb.ToolCall(
                tool=call.name,
                call_id=call.id,
                arguments_json=json.dumps(call.arguments),
                episode=pb.EpisodeKey(task=episode[0], sample=episode[1]),
            )
            [result] = (await child.call("CallTool", pb.CallToolRequest(calls=[wanted]), self._seconds)).results
        except PluginTimeout as error:
            raise ToolTimeout(call.name, self._seconds) from error
        finally:
            self._free.put_nowait(child)
        return _text(result)

    async def close(self, episode: Key) -> None:
        """Do nothing, because functions keep nothing of an episode."""

    async def shutdown(self) -> None:
        """Kill the processes."""
        for child in self._children:
            child.kill()


class SidecarTool:
    """A tool of a sidecar. Its calls overlap. A call that its process did not survive is not
    repeated, because it may have had an effect: the episode is INFRA_FAILED with
    ``PLUGIN_EXITED``."""

    def __init__(self, plugin: str, base_dir: str, seconds: float, verify: Verify = unpinned, calls: Calls | None = None) -> None:
        """plugin: ``plugin.toml:NAME``. seconds: longest time of a call. verify: raises if a file
        has changed. calls: where the sidecar is named."""
        self._manifest = read_manifest(plugin, base_dir, kind="tool")
        self._sidecar = SupervisedSidecar(self._manifest, verify=verify)
        self._seconds = seconds
        self.schemas: Schemas = ()
        if calls is not None:
            calls.supervise(self._manifest.name, lambda: self._sidecar.condition)

    async def start(self) -> None:
        """Start the sidecar. Raises ``RolloutError``."""
        handshake = await self._sidecar.start()
        self.schemas = (tool_schema(handshake, self._manifest.name),)

    async def call(self, episode: Key, call: ToolCall) -> str:
        """The tool's result."""
        wanted = pb.ToolCall(
            tool=call.name,
            call_id=call.id,
            arguments_json=json.dumps(call.arguments),
            episode=pb.EpisodeKey(task=episode[0], sample=episode[1]),
        )
        try:
            [result] = (await self._sidecar.call("CallTool", pb.CallToolRequest(calls=[wanted]), self._seconds)).results
        except PluginTimeout as error:
            raise ToolTimeout(call.name, self._seconds) from error
        return _text(result)

    async def close(self, episode: Key) -> None:
        """Do nothing: the sidecar is not informed of the end of an episode."""

    async def shutdown(self) -> None:
        """End the sidecar."""
        await self._sidecar.close()


def _text(result: pb.ToolResult) -> str:
    if result.infrastructure:
        raise ToolBroken(result.content, result.reason)
    if result.reason:
        raise ToolError(result.content)
    return shortened(result.content)


class ToolBroken(RolloutError):
    """A tool failed, and not because of the policy's call."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason  # type: ignore[misc]  # of this error, not of the class


class Tools:
    """Runs the calls of a turn concurrently and returns their results to the policy. A turn without
    a call is the answer, which the run's reward scores."""

    batched = False  # a slow tool delays no other episode

    def __init__(
        self,
        answers: SingleTurn,
        prompts: PromptReader,
        boxes: Sequence[Toolbox],
        verify: Verify = unpinned,
        *,
        calls: Calls | None = None,
        seconds: float = 0.0,
    ) -> None:
        """answers: scores the last turn. verify: raises if a file of a tool has changed. calls:
        where open calls are recorded. seconds: longest time of a call."""
        self._calls, self._seconds = calls or Calls(), seconds
        self._answers, self._prompts, self._boxes, self._verify = answers, prompts, list(boxes), verify
        self._by_name: dict[str, Toolbox] = {}
        self._schemas: Schemas = ()

    async def start(self) -> None:
        """Start the tools. Raises ``RolloutError``."""
        await self._verify()
        for box in self._boxes:
            await box.start()
            for schema in box.schemas:
                name = schema["function"]["name"]
                if name in self._by_name:
                    raise ToolsInvalid(f"two tools have the name `{name}`", fix="rename one of the functions")
                self._by_name[name] = box
        self._schemas = tuple(schema for box in self._boxes for schema in box.schemas)

    async def shutdown(self) -> None:
        """Stop the tools."""
        for box in self._boxes:
            await box.shutdown()

    async def reset(self, tasks: Sequence[Task]) -> list[Observation | Refusal]:
        """The prompt of each task's row, with the tools."""
        found: list[Observation | Refusal] = []
        for task in tasks:
            try:
                found.append(Observation(messages=tuple(self._prompts.messages(task.row_json)), tools=self._schemas))
            except PromptInvalid as error:
                found.append(Refusal(error.reason, str(error)))
        return found

    async def step(self, turns: Sequence[Turn]) -> list[Observation | Result]:
        """The results of the calls, or the reward of the answer."""
        return list(await asyncio.gather(*(self._step(turn) for turn in turns)))

    async def close(self, episodes: Sequence[Key]) -> None:
        """Release what the episodes left."""
        for episode in episodes:
            for box in self._boxes:
                await box.close(episode)

    async def _step(self, turn: Turn) -> Observation | Result:
        episode = turn.task.key, turn.sample
        if not turn.tool_calls or turn.truncated:
            [result] = await self._answers.step([replace(turn, text=turn.content)])
            await self.close([episode])
            return result
        answer = await answered(turn, partial(self._call, episode, turn.task.row_json))
        if isinstance(answer, Result):
            await self.close([episode])
        return answer

    async def _call(self, episode: Key, row: bytes, call: ToolCall) -> tuple[str, bool]:
        """The text of a result, and whether the call was a mistake."""
        box = self._by_name.get(call.name)
        if box is None:
            raise ToolError(unknown_tool(call.name, self._by_name))
        with self._calls.open(Call("TOOL_CALL", call.name, (row,), self._seconds)):
            return await box.call(episode, call), False
