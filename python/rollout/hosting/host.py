"""Serves the user's code through the methods of ``rollout.plugin.v1``. All three ways to run a
plugin call a ``Host``."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

from google.protobuf.message import Message

from rollout.hosting import wire
from rollout.hosting.answers import state_of
from rollout.hosting.episodes import Checked, load_environment
from rollout.hosting.rows import Rows, load_rows
from rollout.hosting.wire import PluginSchema, PluginUnknown, PluginUnsupported
from rollout.plugin.calling import call_reward, call_reward_async
from rollout.plugin.loading import load_object, load_reward, split_plugin
from rollout.plugin.schema import function_schema
from rollout.plugin.score import RewardFunction
from rollout.plugin.v1 import plugin_pb2 as pb

Source = Mapping[str, str]
"""``{"kind": "reward", "plugin": "file.py:name", "base_dir": "/..."}`` or
``{"expression": "..."}``. plugin: also ``DISTRIBUTION:NAME`` of an installed package. kind: also
``environment``, ``tool``, ``evaluation``, ``data_source``; a reward if it is missing. args: of an
environment, a JSON object."""
NO_DEADLINE = 1e9
KINDS = {
    "reward": pb.PLUGIN_KIND_REWARD,
    "environment": pb.PLUGIN_KIND_ENVIRONMENT,
    "tool": pb.PLUGIN_KIND_TOOL,
    "evaluation": pb.PLUGIN_KIND_EVALUATION,
    "data_source": pb.PLUGIN_KIND_DATA_SOURCE,
}
RESPONSES: dict[str, type[Message]] = {
    "Handshake": pb.HandshakeResponse,
    "Reward": pb.RewardResponse,
    "ResetEnvironment": pb.ResetEnvironmentResponse,
    "StepEnvironment": pb.StepEnvironmentResponse,
    "CloseEnvironment": pb.CloseEnvironmentResponse,
    "SaveEnvironment": pb.SaveEnvironmentResponse,
    "LoadEnvironment": pb.LoadEnvironmentResponse,
    "CallTool": pb.CallToolResponse,
    "Evaluate": pb.EvaluateResponse,
    "ReadRows": pb.ReadRowsResponse,
}
"""The methods of PluginService and their responses. The request types are derived from the names
(``request_type``)."""


def request_type(method: str) -> type[Message]:
    """The request message of a method."""
    return getattr(pb, f"{method}Request")


class Host:
    """Plugins by kind and name. Methods take and return messages; they raise ``RolloutError``."""

    def __init__(self, plugins: Mapping[tuple[str, str], Any], executor: Executor | None = None, version: str = "") -> None:
        """plugins: (kind, name) -> function, or environment. executor: runs blocking functions;
        None: the caller's thread. version: of the plugins; empty: not stated."""
        self._plugins, self._executor, self._version = dict(plugins), executor, version

    @classmethod
    def load(cls, sources: Sequence[Source], executor: Executor | None = None, *, version: str = "") -> Host:
        """Import plugins. Raises ``RewardImportError``, ``ExpressionError``."""
        return cls(dict(_load(source) for source in sources), executor, version)

    async def call(self, method: str, request: Any) -> Message:
        """Answer one call."""
        match method:
            case "Handshake":
                return self._handshake(request)
            case "Reward":
                scores = await self._score(self._find("reward", request.plugin), request)
                return pb.RewardResponse(scores=wire.scores_to(scores))
            case "Evaluate":
                scores = await self._score(self._find("evaluation", request.plugin), request)
                mean = sum(score.reward for score in scores) / len(scores)
                return pb.EvaluateResponse(scores=wire.scores_to(scores), metrics={"score": mean})
            case "ReadRows":
                return await self._read_rows(request)
            case "CallTool":
                return pb.CallToolResponse(results=[await self._call_tool(call) for call in request.calls])
            case _:
                return await self._environment(method, self._find("environment", request.plugin), request)

    def _find(self, kind: str, name: str) -> Any:
        found = [plugin for (k, n), plugin in self._plugins.items() if k == kind and name in (n, "")]
        if len(found) != 1:
            names = ", ".join(n for k, n in self._plugins if k == kind) or "none"
            raise PluginUnknown(f"there is no {kind} named {name!r}", fix=f"name one of: {names}")
        return found[0]

    def _handshake(self, request: pb.HandshakeRequest) -> pb.HandshakeResponse:
        if request.schema_version != wire.SCHEMA_VERSION:
            text = f"the caller has version {request.schema_version} of rollout.plugin.v1, this service {wire.SCHEMA_VERSION}"
            raise PluginSchema(text, fix="update the one with the older version")
        infos = [
            pb.PluginInfo(
                kind=KINDS[kind],
                name=name,
                description=_described(plugin)["description"] if kind == "tool" else "",
                parameters_json=json.dumps(_described(plugin)["parameters"]) if kind == "tool" else "",
                saves_state=isinstance(plugin, Checked) and plugin.saves_state,
                one_at_a_time=isinstance(plugin, Checked) and not plugin.batched,
                waits_for_siblings=isinstance(plugin, Checked) and plugin.waits_for_siblings,
                saves_episodes=isinstance(plugin, Checked) and plugin.saves_episodes,
                version=self._version,
            )
            for (kind, name), plugin in self._plugins.items()
        ]
        return pb.HandshakeResponse(schema_version=wire.SCHEMA_VERSION, plugins=infos)

    async def _score(self, function: RewardFunction, request: Any) -> list[Any]:
        samples = wire.samples_of(request.groups)
        if self._executor is None and not inspect.iscoroutinefunction(function):
            return call_reward(function, samples)
        return await call_reward_async(function, samples, timeout_seconds=NO_DEADLINE, executor=self._executor)

    async def _read_rows(self, request: pb.ReadRowsRequest) -> pb.ReadRowsResponse:
        source: Rows = self._find("data_source", request.plugin)
        if self._executor is None:
            rows, end = source.read(request.split, request.offset, request.limit)
        else:
            work = partial(source.read, request.split, request.offset, request.limit)
            rows, end = await asyncio.get_running_loop().run_in_executor(self._executor, work)
        return pb.ReadRowsResponse(rows_json=rows, end=end)

    async def _call_tool(self, call: pb.ToolCall) -> pb.ToolResult:
        function = self._find("tool", call.tool)
        try:
            result = function(**json.loads(call.arguments_json or "{}"))
            if inspect.isawaitable(result):
                result = await result
        except Exception as error:  # of the policy's call, unless the tool sets another
            reason = getattr(error, "reason", "TOOL_RAISED")
            return pb.ToolResult(
                call_id=call.call_id, content=f"{type(error).__name__}: {error}", reason=reason,
                infrastructure=bool(getattr(error, "infrastructure", False)),
            )  # fmt: skip
        return pb.ToolResult(call_id=call.call_id, content=result if isinstance(result, str) else json.dumps(result))

    async def _environment(self, method: str, environment: Checked, request: Any) -> Message:
        match method:
            case "ResetEnvironment":
                starts = await environment.reset([wire.task_from(task) for task in request.tasks])
                return pb.ResetEnvironmentResponse(starts=[wire.start_to(start) for start in starts])
            case "StepEnvironment":
                turns = [wire.turn_from(turn) for turn in request.turns]
                answers = [wire.answer_to(answer) for answer in await environment.step(turns)]
                states = [environment.saved(turn.task.key, turn.sample) for turn in turns] if request.save else ()
                return pb.StepEnvironmentResponse(answers=answers, states=states)
            case "CloseEnvironment":
                await environment.close([(episode.task, episode.sample) for episode in request.episodes])
                return pb.CloseEnvironmentResponse()
            case _ if not environment.saves_state:
                raise PluginUnsupported(f"the environment does not implement {method}")
            case "SaveEnvironment":
                return pb.SaveEnvironmentResponse(state=state_of(environment.state_dict(), environment.name))
            case _ if request.add:
                environment.add_state_dict(json.loads(request.state))
                return pb.LoadEnvironmentResponse()
            case _:
                environment.load_state_dict(json.loads(request.state))
                return pb.LoadEnvironmentResponse()


def _described(tool: Any) -> dict[str, Any]:
    """Description and parameters of a tool: those that it states (``parameters_json``), otherwise
    those of its docstring and types."""
    if (stated := getattr(tool, "parameters_json", None)) is not None:
        return {"description": inspect.getdoc(tool) or "", "parameters": json.loads(stated)}
    return function_schema(tool)["function"]


def _load(source: Source) -> tuple[tuple[str, str], Any]:
    kind = source.get("kind", "reward")
    if "expression" in source:
        from rollout.expression import Expression

        return (kind, "expression"), Expression(source["expression"])
    plugin, base_dir = source["plugin"], source.get("base_dir", ".")
    name = split_plugin(plugin)[1]
    if kind in ("reward", "evaluation"):
        return (kind, name), load_reward(plugin, base_dir, kind=kind)
    if kind == "environment":
        return (kind, name), load_environment(plugin, base_dir, json.loads(source.get("args") or "{}"))
    if kind == "data_source":
        return (kind, name), load_rows(plugin, base_dir)
    return (kind, name), load_object(plugin, base_dir, kind=kind)
