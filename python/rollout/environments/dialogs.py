"""Environments of ``verifiers`` 0.2, unmodified: the package drives the conversation and scores it,
and rollout samples the turns."""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import json
import math
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rollout.environment import Message, Observation, Refusal, Result, Task, Turn
from rollout.environments import ArgumentInvalid, PackageMissing
from rollout.errors import Place
from rollout.hosting.answers import EnvironmentBadResult
from rollout.hosting.episodes import EnvironmentFailed, EnvironmentImport
from rollout.plugin.loading import load_object, split_plugin
from rollout.plugin.place import last_frame, one_line
from rollout.plugin.score import RewardImportError

_EXTERNAL = 'play it with `environment.kind = "external"`, where a gateway session records such a turn as a fork'


class ConversationUnsupported(EnvironmentFailed):
    """A turn that is not the continuation of the one before it."""

    reason: ClassVar[str] = "CONVERSATION_UNSUPPORTED"


class Verifiers:
    """Each sample is a rollout of the environment with its own state. The rollout asks for a
    turn through a client of verifiers, whose call ends when the turn has been sampled. The prompt
    of a turn must be the earlier messages and further ones: then the episode is one sequence of
    tokens. The rubric gives the reward and the metrics.

    id: of an installed environment, as ``verifiers.load_environment`` takes it. path: instead,
    ``file.py:load_environment``, which starts at ``base_dir``. args: of ``load_environment``.
    ``index`` in the row selects the example of the environment's dataset, ``split = "eval"`` of its
    evaluation dataset.
    """

    batched = False  # a turn must not wait for the tools of others

    def __init__(self, id: str = "", path: str = "", base_dir: str = ".", args: Mapping[str, Any] | None = None) -> None:
        if bool(id) == bool(path):
            raise ArgumentInvalid(
                "the environment of verifiers has no name" if not id else "`id` and `environment.path` name two environments",
                fix='write `id = "NAME"` in [environment.args], or `path = "file.py:load_environment"` in [environment]',
            )
        try:
            verifiers: Any = importlib.import_module("verifiers")
        except ImportError as error:
            raise PackageMissing("verifiers", error) from error
        if not hasattr(verifiers, "load_environment"):
            raise ArgumentInvalid(
                "this version of verifiers has no `load_environment`", fix='use 0.2.1, or `environment.kind = "external"`'
            )
        self._name = id or path
        self._folder = Path(os.path.abspath(os.path.join(base_dir, split_plugin(path)[0]))).parent if path else None
        given = dict(args or {})
        self._env: Any = _local(path, base_dir, self._folder, given) if self._folder else _installed(verifiers, id, given)
        if not isinstance(self._env, verifiers.Environment):
            raise EnvironmentImport(
                f"`load_environment` of `{self._name}` returned {type(self._env).__name__}, not an environment of verifiers",
                fix="return a `verifiers.Environment`",
            )
        self._client = _client_class()
        self._watch_rubrics()
        self.waits_for_siblings = bool(self._env.requires_group_rollouts)
        self._groups: dict[str, _Group] = {}

    async def reset(self, tasks: Sequence[Task]) -> list[Observation | Refusal]:
        """Begin the rollouts of each task, up to their first turn."""
        return [await self._begin(task) for task in tasks]

    async def step(self, turns: Sequence[Turn]) -> list[Observation | Result]:
        """Continue the rollouts with these turns, up to their next turn or their end."""
        return list(await asyncio.gather(*(self._continue(turn) for turn in turns)))

    async def close(self, episodes: Sequence[tuple[str, int]]) -> None:
        """Cancel these rollouts, which runs the cleanup of their environment."""
        ended: list[asyncio.Task[Any]] = []
        for key, sample in episodes:
            if (group := self._groups.get(key)) is None or (rollout := group.open.pop(sample, None)) is None:
                continue
            rollout.task.cancel()
            ended.append(rollout.task)
            group.finished.pop(sample, None)
            if not group.open:
                del self._groups[key]
            else:
                self._score_when_complete(group)
        await asyncio.gather(*ended, return_exceptions=True)

    async def _begin(self, task: Task) -> Observation | Refusal:
        await self.close([(task.key, sample) for sample in task.samples])
        row: Any = json.loads(task.row_json or b"{}")
        index, split = row.get("index"), row.get("split", "train")
        if split not in ("train", "eval"):
            return Refusal("ROW_INVALID", f'`split` is {split!r}, not "train" or "eval"')
        data = await asyncio.to_thread(self._env.get_dataset if split == "train" else self._env.get_eval_dataset)
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(data):
            return Refusal("ROW_INVALID", f"`index` is {index!r}, not the number of an example from 0 to {len(data) - 1}")
        group = self._groups[task.key] = _Group()
        for sample in task.samples:
            group.open[sample] = rollout = _Rollout()
            rollout.task = asyncio.create_task(self._env.rollout(dict(data[index]), self._client(rollout), "policy", {}))
        try:
            rollouts = list(group.open.values())
            requests = await asyncio.gather(*(rollout.request() for rollout in rollouts))
            for rollout, request in zip(rollouts, requests, strict=True):
                if request is None:
                    self._checked(rollout)
                    raise EnvironmentFailed(
                        f"a rollout of `{self._name}` ended before the first turn", fix="correct the environment"
                    )
                if request != requests[0]:
                    raise EnvironmentBadResult(
                        f"two rollouts of example {index} of `{self._name}` began with different messages",
                        fix="make `setup_state` depend on the example only",
                    )
        except BaseException:
            await self.close([(task.key, sample) for sample in task.samples])
            raise
        first = rollouts[0]
        return Observation(messages=tuple(first.messages), tools=first.tools)

    async def _continue(self, turn: Turn) -> Observation | Result:
        group = self._groups.get(turn.task.key)
        if group is None or (rollout := group.open.get(turn.sample)) is None:
            raise EnvironmentFailed(f"sample {turn.sample} of {turn.task.key} has no open episode: its process has ended")
        before, tools = [*rollout.messages, _said(turn)], rollout.tools
        rollout.answer(turn)
        if await rollout.request() is None:
            return await self._result(turn, group, rollout)
        known = rollout.messages[: len(before)]
        if [_shown(message) for message in known] != [_shown(message) for message in before]:
            at = next((i for i, (a, b) in enumerate(zip(known, before, strict=False)) if _shown(a) != _shown(b)), len(known))
            raise self._unsupported(f"rewrote message {at + 1} before turn {turn.number + 2}")
        if len(rollout.messages) == len(before):
            raise self._unsupported(f"added no message before turn {turn.number + 2}")
        if rollout.tools != tools:
            raise self._unsupported(f"changed its tools before turn {turn.number + 2}")
        return Observation(messages=tuple(rollout.messages[len(before) :]))

    async def _result(self, turn: Turn, group: _Group, rollout: _Rollout) -> Result:
        state = self._checked(rollout)
        failures: list[tuple[str, BaseException]] = []
        if self.waits_for_siblings:
            group.finished[turn.sample] = state
            self._score_when_complete(group)
            failures = await asyncio.shield(group.scored)
        else:
            failures = await self._score([state])
        for name, error in failures:
            raise self._failed(f"`{name}` of the rubric of `{self._name}` raised {one_line(error)}", error)
        reward: Any = state["reward"]
        metrics: dict[str, Any] = dict(state["metrics"] or {})
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise EnvironmentBadResult(
                    f"`{name}` of the rubric of `{self._name}` returned {value}", fix="expected a finite number"
                )
        group.open.pop(turn.sample, None)
        if not group.open:
            self._groups.pop(turn.task.key, None)
        return Result(reward=reward, metrics=metrics, outcome="truncated" if state.get("is_truncated") else "completed")

    def _checked(self, rollout: _Rollout) -> Any:
        """The final state of a rollout. Raises ``EnvironmentFailed`` unless it can be scored: an
        error of a tool call that ends the rollout is the policy's, any other the environment's."""
        if rollout.task.cancelled():
            raise EnvironmentFailed(f"a rollout of `{self._name}` was cancelled")
        if (error := rollout.task.exception()) is not None:
            raise self._failed(f"`{self._name}` raised {one_line(error)}", error) from error
        state = rollout.task.result()
        if state.get("timed_out"):
            raise EnvironmentFailed(
                f"a rollout of `{self._name}` reached its `timeout_seconds`",
                fix="raise it; `episode_timeout_seconds` bounds it, too",
            )
        ended = state.get("error")
        if ended is None or isinstance(ended, importlib.import_module("verifiers").ToolError):
            return state
        if isinstance(ended.__cause__, EnvironmentFailed):
            raise ended.__cause__
        cause = ended.__cause__ or ended
        raise self._failed(f"`{self._name}` raised {one_line(cause)}", cause) from ended

    def _score_when_complete(self, group: _Group) -> None:
        """Score a group whose open rollouts have all ended."""
        if group.finished and group.finished.keys() == group.open.keys() and not group.scoring:

            async def score() -> None:
                try:
                    group.scored.set_result(await self._score(list(group.finished.values())))
                except Exception as error:
                    group.scored.set_result([("score_group", error)])

            group.scoring.append(asyncio.create_task(score()))

    async def _score(self, states: list[Any]) -> list[tuple[str, BaseException]]:
        """Score rollouts, and return the errors of reward functions. The rubric takes them for a
        reward of 0."""
        rubric, failures = self._env.rubric, list[tuple[str, BaseException]]()
        self._watch_rubrics()
        token = _FAILURES.set(failures)
        began = time.time()
        try:
            for state in states:
                state["timing"].scoring.start = began
            if not self._env.score_rollouts:
                await rubric.dummy_score_group(states)
            elif self.waits_for_siblings:
                await rubric.score_group(states)
            else:
                await rubric.score_rollout(states[0])
            for state in states:
                state["timing"].scoring.end = time.time()
                await rubric.cleanup(state)
        except Exception as error:
            failures.append((type(rubric).__name__, error))
        finally:
            _FAILURES.reset(token)
        return failures

    def _watch_rubrics(self) -> None:
        for rubric in _rubrics(self._env.rubric):
            rubric.funcs = [
                function if hasattr(function, "_rollout_watched") else _watched(function, group=rubric._is_group_func(function))
                for function in rubric.funcs
            ]

    def _failed(self, what: str, error: BaseException) -> EnvironmentFailed:
        return EnvironmentFailed(
            what, fix="correct the environment: the episode is INFRA_FAILED and its group is retried, then excluded",
            place=_place(error, self._folder),
        )  # fmt: skip

    def _unsupported(self, what: str) -> ConversationUnsupported:
        return ConversationUnsupported(f"`{self._name}` {what}: its turns do not continue each other", fix=_EXTERNAL)


@dataclass(slots=True, eq=False)
class _Group:
    """The rollouts of a task. finished: states that wait for the others, which are scored
    together."""

    open: dict[int, _Rollout] = field(default_factory=dict[int, "_Rollout"])
    finished: dict[int, Any] = field(default_factory=dict[int, Any])
    scoring: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])
    scored: asyncio.Future[list[tuple[str, BaseException]]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class _Rollout:
    """A rollout and its open request. messages, tools: of the last request."""

    task: asyncio.Task[Any]

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.tools: tuple[Mapping[str, Any], ...] = ()
        loop = asyncio.get_running_loop()
        self._asked: asyncio.Future[tuple[Any, Any]] = loop.create_future()
        self._answer: asyncio.Future[Turn] | None = None

    async def request(self) -> tuple[Any, Any] | None:
        """Messages and tools of the next request; None at the end of the rollout."""
        asked = self._asked
        await asyncio.wait([asked, self.task], return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            return None
        self.messages, self.tools = asked.result()
        return asked.result()

    async def ask(self, messages: list[dict[str, Any]], tools: tuple[Mapping[str, Any], ...]) -> Turn:
        """Wait until the turn has been sampled."""
        if self._answer is not None:
            raise ConversationUnsupported("a rollout asked for two turns at the same time", fix=_EXTERNAL)
        self._answer = asyncio.get_running_loop().create_future()
        self._asked.set_result((messages, tools))
        try:
            return await self._answer
        finally:
            self._answer = None

    def answer(self, turn: Turn) -> None:
        """Give the rollout its turn."""
        assert self._answer is not None, "the rollout has asked"
        self._asked = asyncio.get_running_loop().create_future()
        self._answer.set_result(turn)


@functools.cache
def _client_class() -> Any:
    """The class of the client: constructed with a rollout, which it asks for turns."""
    types: Any = importlib.import_module("verifiers.types")
    base: Any = importlib.import_module("verifiers.clients").Client

    class Policy(base):  # pyright: ignore[reportUntypedBaseClass]
        def setup_client(self, config: Any) -> Any:
            raise NotImplementedError("the policy has no configuration")

        async def to_native_tool(self, tool: Any) -> dict[str, Any]:
            function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
            return {"type": "function", "function": function}

        async def to_native_prompt(self, messages: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
            return [_message(message) for message in messages], {}

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Mapping[str, Any], tools: Any = None, **_: Any
        ) -> Turn:
            if sampling_args:
                raise ConversationUnsupported(
                    f"a rollout sets its own sampling arguments: {', '.join(sampling_args)}", fix="set them in [sampling]"
                )
            return await self.client.ask(prompt, tuple(tools or ()))

        async def raise_from_native_response(self, response: Turn) -> None:
            """Do nothing: an empty answer is the policy's, and the rubric scores it."""

        async def from_native_response(self, response: Turn) -> Any:
            said = _said(response)
            calls = [
                types.ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
                for call in said.get("tool_calls", ())
            ]
            message = types.ResponseMessage(
                content=said["content"],
                reasoning_content=response.reasoning or None,
                tool_calls=calls or None,
                finish_reason="length" if response.truncated else "tool_calls" if calls else "stop",
                is_truncated=response.truncated,
            )
            return types.Response(
                id=f"{response.task.key}#{response.sample}.{response.number}",
                created=int(time.time()),
                model="policy",
                message=message,
            )

        async def close(self) -> None:
            """Do nothing: the client has no connection."""

    return Policy


def _message(message: Any) -> dict[str, Any]:
    """A message of verifiers in OpenAI's form."""
    given: dict[str, Any] = message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else dict(message)
    if given["role"] == "text":
        raise ConversationUnsupported("the environment completes a text without roles", fix="give it messages of a chat")
    kept = {name: given[name] for name in ("role", "tool_call_id", "reasoning_content") if given.get(name)}
    kept["content"] = given.get("content") or ""
    if calls := given.get("tool_calls"):
        kept["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in calls
        ]
    return kept


def _said(turn: Turn) -> dict[str, Any]:
    """The message of a turn."""
    said: dict[str, Any] = {"role": "assistant", "content": turn.content}
    if turn.tool_calls:
        said["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.raw or json.dumps(dict(call.arguments))},
            }
            for call in turn.tool_calls
        ]
    return said


def _shown(message: Message) -> tuple[Any, ...]:
    """What two equal messages share. The tokens of the reasoning stay in the episode, whether or
    not the environment repeats it."""
    return message["role"], message["content"], message.get("tool_calls"), message.get("tool_call_id")


def _installed(verifiers: Any, name: str, args: dict[str, Any]) -> Any:
    try:
        return verifiers.load_environment(name, **args)
    except Exception as error:
        cause = error.__cause__ or error
        if isinstance(cause, ModuleNotFoundError) and cause.name == name.replace("-", "_").split("/")[-1]:
            raise ArgumentInvalid(
                f"verifiers has no environment `{name}`: {cause}",
                fix="install its package into `environment.python` with its pip, or correct `id` in [environment.args]",
            ) from error
        raise EnvironmentImport(
            f"`load_environment` of `{name}` raises {one_line(cause)}",
            fix="correct `[environment.args]`",
            place=_place(cause, None),
        ) from error


def _local(path: str, base_dir: str, folder: Path | None, args: dict[str, Any]) -> Any:
    name = split_plugin(path)[1]
    try:
        load = load_object(path, base_dir)
    except RewardImportError as error:
        fix = error.fix.replace(f"`def {name}(samples)`", f"`def {name}(...)`")
        raise EnvironmentImport(error.message, fix=fix, place=error.place) from error
    try:
        inspect.signature(load).bind(**args)
    except TypeError as error:
        shown = ", ".join(f"{key}={value!r}" for key, value in args.items())
        fix = f"`args` in [environment.args] must fit `{name}{inspect.signature(load)}`"
        raise EnvironmentImport(f"`{name}({shown})`: {error}", fix=fix) from None
    try:
        return load(**args)
    except Exception as error:
        raise EnvironmentImport(
            f"`{name}` of `{path}` raises {one_line(error)}",
            fix="correct it, or `args` in [environment.args]",
            place=last_frame(error, folder),
        ) from error


def _place(error: BaseException, folder: Path | None) -> Place | None:
    """The innermost line of an error outside of verifiers."""
    if folder is not None:
        return last_frame(error, folder)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "verifiers" not in Path(frame.filename).parts:
            return Place(frame.filename, frame.lineno or 0, 1, frame.line or "")
    return None


_FAILURES: ContextVar[list[tuple[str, BaseException]]] = ContextVar("failures")
"""The errors of reward functions during the scoring of this context."""


def _rubrics(rubric: Any) -> Iterator[Any]:
    """A rubric and those that it consists of."""
    yield rubric
    for part in getattr(rubric, "rubrics", ()):
        yield from _rubrics(part)
    for environment in getattr(rubric, "env_map", {}).values():
        yield from _rubrics(environment.rubric)


def _watched(function: Callable[..., Any], *, group: bool) -> Callable[..., Any]:
    """A reward function whose errors are recorded before the rubric replaces them by 0."""
    name = getattr(function, "__name__", type(function).__name__)

    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            answer = function(*args, **kwargs)
            if inspect.isawaitable(answer):
                answer = await answer
            return [float(value) for value in answer] if group else float(answer)
        except Exception as error:
            _FAILURES.get().append((name, error))
            raise

    watched: Any = functools.update_wrapper(call, function)
    watched._rollout_watched = True
    return watched
