"""The environment of MCP servers: as ``tools``, with the functions of servers. A child process has
the connections, with the interpreter that has the package ``mcp``."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from rollout.environment import Answer, Observation, Refusal, Task, Turn
from rollout.environments import source
from rollout.errors import RolloutError
from rollout.plan.v1.plan_pb2 import Tool
from rollout_workers.data.prompts import PromptInvalid, PromptReader
from rollout_workers.environments.hosted import Hosted
from rollout_workers.environments.registry import Context
from rollout_workers.environments.single_turn import SingleTurn
from rollout_workers.environments.single_turn import build as build_single_turn
from rollout_workers.rewards.pinned import EnvironmentChanged


def build(context: Context) -> McpTools:
    """Build the environment for the registry."""
    environment = context.config.environment
    python = os.path.join(context.base_dir, environment.python) if environment.python else sys.executable
    args = {
        "args": context.args,
        "base_dir": os.path.abspath(context.base_dir),
        "seconds": environment.tool_timeout_seconds,
        "pinned": None if context.tools is None else digests(context.tools),
    }
    # one process, so that `per = "worker"` is one server
    hosted = Hosted(source("mcp", "", context.base_dir, json.dumps(args)), processes=1, command=(python,), verify=context.verify)
    return McpTools(build_single_turn(context), context.prompts, hosted, context.changed)


def digests(tools: Sequence[Tool]) -> dict[str, dict[str, str]]:
    """Server -> tool -> digest."""
    found: dict[str, dict[str, str]] = {}
    for tool in tools:
        found.setdefault(tool.server, {})[tool.name] = tool.digest
    return found


class McpTools:
    """Returns the results of a turn's calls to the policy. A turn without a call is the answer,
    which the run's reward scores."""

    batched = False  # a slow tool delays no other episode

    def __init__(self, answers: SingleTurn, prompts: PromptReader, calls: Hosted, changed: Callable[[str], None]) -> None:
        """answers: scores the last turn. calls: makes the calls. changed: called with the message
        if the tools of a server differ from the plan."""
        self._answers, self._prompts, self._calls, self._changed = answers, prompts, calls, changed

    async def start(self) -> None:
        """Start the servers, and check their tools. Raises ``RolloutError``."""
        await self._calls.start()
        check = Task("start", b"{}", (0,), (0,))
        [first] = await self._calls.reset([check])
        await self._calls.close([(check.key, 0)])
        if isinstance(first, Refusal):
            raise (EnvironmentChanged if first.reason == EnvironmentChanged.reason else McpUnavailable)(first.message)

    async def shutdown(self) -> None:
        """Kill the process with the connections, and the servers that it started."""
        await self._calls.shutdown()

    async def reset(self, tasks: Sequence[Task]) -> list[Observation | Refusal]:
        """The prompt of each task's row, with the tools."""
        found: list[Observation | Refusal] = []
        for task, first in zip(tasks, await self._calls.reset(tasks), strict=True):
            if isinstance(first, Refusal):
                if first.reason == EnvironmentChanged.reason:
                    self._changed(first.message)
                found.append(first)
                continue
            try:
                found.append(replace(first, messages=tuple(self._prompts.messages(task.row_json))))
            except PromptInvalid as error:
                found.append(Refusal(error.reason, str(error)))
        return found

    async def step(self, turns: Sequence[Turn]) -> list[Answer]:
        """The results of the calls, or the reward of the answer."""
        return list(await asyncio.gather(*(self._step(turn) for turn in turns)))

    async def close(self, episodes: Sequence[tuple[str, int]]) -> None:
        """End what belongs to the episodes."""
        await self._calls.close(episodes)

    async def _step(self, turn: Turn) -> Answer:
        if turn.tool_calls and not turn.truncated:
            [answer] = await self._calls.step([turn])
            return answer
        [result] = await self._answers.step([replace(turn, text=turn.content)])
        await self._calls.close([(turn.task.key, turn.sample)])
        return result


class McpUnavailable(RolloutError):
    """A server could not be started, or the tools do not fit the configuration."""

    reason = "MCP_SERVER_FAILED"
