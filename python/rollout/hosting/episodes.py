"""Loads an environment of a user's, and runs one that is written for one episode
(``rollout.environment.SingleEpisode``)."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

from rollout.environment import Answer, Environment, Observation, Refusal, Result, Sessions, SingleEpisode, Task, Turn
from rollout.errors import Place, RolloutError
from rollout.hosting.answers import EnvironmentBadResult, answers_of, observation_of, same, starts_of, state_of
from rollout.plugin.loading import load_object, split_plugin
from rollout.plugin.place import last_frame, one_line
from rollout.plugin.score import RewardImportError


class EnvironmentImport(RolloutError):
    """The environment's file can't be imported, or its class can't be constructed."""

    reason: ClassVar[str] = "ENVIRONMENT_IMPORT"


class EnvironmentFailed(RolloutError):
    """A method of an environment raised."""

    reason: ClassVar[str] = "ENVIRONMENT_FAILED"


@dataclass(frozen=True, slots=True)
class LoadedClass:
    """A class of a user's, with the arguments of its constructor. path: its file."""

    made: type
    path: str
    args: Mapping[str, Any]

    def make(self) -> Any:
        """Construct one. Raises :class:`EnvironmentImport`, or the ``RolloutError`` of the
        constructor."""
        return self.named(lambda: self.made(**self.args))

    def named(self, construct: Callable[[], Any]) -> Any:
        """The result of a call that constructs one. Raises as ``make`` does."""
        try:
            return construct()
        except (RolloutError, KeyboardInterrupt):
            raise
        except BaseException as error:
            what = "calls sys.exit" if isinstance(error, SystemExit) else f"raises {one_line(error)}"
            raise EnvironmentImport(
                f"`{self.made.__name__}()` {what}", fix="correct the constructor", place=last_frame(error, Path(self.path).parent)
            ) from error


def load_class(
    plugin: str,
    base_dir: str | os.PathLike[str],
    args: Mapping[str, Any],
    *,
    methods: Sequence[str],
    base: str = "",
    table: str,
    kind: str = "",
) -> LoadedClass:
    """Import ``file.py:Class``. methods: that it must have, because of the class ``base`` if one is
    named. table: of the configuration that has ``args``. kind: as in ``load_object``. Raises
    :class:`EnvironmentImport`."""
    try:
        made = load_object(plugin, base_dir, kind=kind)
    except RewardImportError as error:
        name = split_plugin(plugin)[1]
        fix = error.fix.replace(f"`def {name}(samples)`", f"`class {name}({base})`" if base else f"`class {name}`")
        raise EnvironmentImport(
            error.message.replace("no function", "no class"),
            fix=fix.replace("name a function", "name a class"),
            place=error.place,
        ) from error
    name, path = split_plugin(plugin)[1], os.path.abspath(os.path.join(base_dir, split_plugin(plugin)[0]))
    place = Place(path)
    if not isinstance(made, type):
        raise EnvironmentImport(f"`{name}` is of type {type(made).__name__}, not a class", fix="name a class", place=place)
    missing = [method for method in methods if not callable(getattr(made, method, None))]
    if missing:
        wanted = f"derive it from `rollout.environment.{base}`" if base else f"write {_and(methods)} as in gymnasium"
        raise EnvironmentImport(f"`{name}` has no method `{missing[0]}`", fix=wanted, place=place)
    try:
        inspect.signature(made).bind(**args)
    except TypeError as error:
        shown = ", ".join(f"{key}={value!r}" for key, value in args.items())
        raise EnvironmentImport(
            f"`{name}({shown})`: {error}", fix=f"`{table}.args` must fit `{name}{inspect.signature(made)}`", place=place
        ) from None
    return LoadedClass(made, path, args)


def _and(names: Sequence[str]) -> str:
    return " and ".join(f"`{name}`" for name in names)


def load_environment(plugin: str, base_dir: str | os.PathLike[str] = ".", args: Mapping[str, Any] | None = None) -> Checked:
    """Construct ``file.py:Class`` with ``args``. Raises :class:`EnvironmentImport`."""
    loaded = load_class(
        plugin,
        base_dir,
        dict(args or {}),
        methods=("reset", "step", "close"),
        base="SingleEpisode",
        table="environment",
        kind="environment",
    )
    name, folder = split_plugin(plugin)[1], Path(loaded.path).parent
    if not issubclass(loaded.made, SingleEpisode):
        return Checked(cast(Environment, loaded.make()), name, folder)
    make = cast("Callable[[], SingleEpisode]", functools.partial(loaded.made, **loaded.args))
    return Checked(loaded.named(lambda: Episodes(make)), name, folder)


class Checked:
    """An environment whose exceptions name its class and line, and whose answers are checked."""

    def __init__(self, inner: Environment, name: str, folder: Path | None) -> None:
        """name: of the class. folder: of its file."""
        self.inner, self.name, self._folder = inner, name, folder
        self.batched: bool = getattr(inner, "batched", True)
        self.waits_for_siblings: bool = getattr(inner, "waits_for_siblings", False)

    @property
    def saves_state(self) -> bool:
        """Whether open episodes can be saved."""
        inner = self.inner
        return inner.saves_state if isinstance(inner, Episodes) else callable(getattr(inner, "state_dict", None))

    @property
    def saves_episodes(self) -> bool:
        """Whether single episodes can be saved and added."""
        return isinstance(self.inner, Episodes) and self.inner.saves_state

    def saved(self, key: str, sample: int) -> bytes:
        """The state of an open episode as JSON, after a step that did not end it; empty if the
        episode is not open or waits for a child session. Raises ``EnvironmentBadResult``."""
        assert isinstance(self.inner, Episodes)
        episode = self.inner.between_turns(key, sample)
        return b"" if episode is None else state_of(cast(Any, episode).state_dict(), self.name)

    def add_state_dict(self, state: Mapping[str, Any]) -> None:
        """Add saved episodes to the open ones. Raises ``EnvironmentFailed``."""
        assert isinstance(self.inner, Episodes)
        self.inner.add_state_dict(state)

    async def start(self) -> None:
        """Start the inner environment if it has something to start."""
        if (start := getattr(self.inner, "start", None)) is not None:
            await self._guarded("start", start())

    async def shutdown(self) -> None:
        """Stop the inner environment if it has something to stop."""
        if (shutdown := getattr(self.inner, "shutdown", None)) is not None:
            await self._guarded("shutdown", shutdown())

    async def reset(self, tasks: Sequence[Task]) -> list[Observation | Refusal]:
        """The first observation of each task."""
        return starts_of(tasks, await self._guarded("reset", lambda: self.inner.reset(tasks)), self.name)

    async def step(self, turns: Sequence[Turn]) -> list[Answer]:
        """The answer to each turn."""
        return answers_of(turns, await self._guarded("step", lambda: self.inner.step(turns)), self.name)

    async def close(self, episodes: Sequence[tuple[str, int]]) -> None:
        """Release these episodes."""
        await self._guarded("close", lambda: self.inner.close(episodes))

    def state_dict(self) -> Mapping[str, Any]:
        """The open episodes."""
        return cast(Any, self.inner).state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the open episodes."""
        cast(Any, self.inner).load_state_dict(state)

    async def _guarded(self, method: str, call: Any) -> Any:
        try:
            return await awaited(call() if callable(call) else call)
        except (KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, EnvironmentBadResult, EnvironmentFailed):
            raise
        except BaseException as error:
            what = "called sys.exit" if isinstance(error, SystemExit) else f"raised {one_line(error)}"
            place = last_frame(error, self._folder)
            fix = "correct the environment: the episode is INFRA_FAILED and its group is retried, then excluded"
            failed = EnvironmentFailed(f"`{self.name}.{method}` {what}", fix=fix, place=place)
            reason = getattr(error, "reason", None)
            if isinstance(reason, str) and reason:
                failed.__dict__["reason"] = reason
            raise failed from error


class Episodes:
    """The ``Environment`` of a ``SingleEpisode`` class."""

    batched = False

    def __init__(self, make: Callable[[], SingleEpisode]) -> None:
        self._make = make
        self._open: dict[tuple[str, int], SingleEpisode] = {}
        self._steps: dict[tuple[str, int], _Step] = {}  # that have begun and not ended
        self.saves_state = callable(getattr(make(), "state_dict", None))

    async def reset(self, tasks: Sequence[Task]) -> list[Observation | Refusal]:
        """Make the instances of each task, which must have the same first observation."""
        return [await self._reset(task) for task in tasks]

    async def step(self, turns: Sequence[Turn]) -> list[Any]:
        """The answer of each turn's instance, which is closed after a result."""
        return [await self._step(turn) for turn in turns]

    async def close(self, episodes: Sequence[tuple[str, int]]) -> None:
        """Close the instances of these episodes."""
        for key in episodes:
            if (step := self._steps.pop(key, None)) is not None:
                await step.cancel()
            if (episode := self._open.pop(key, None)) is not None:
                await awaited(episode.close())

    def state_dict(self) -> Mapping[str, Any]:
        """The state of every instance. Raises ``EnvironmentFailed`` if one waits for a child
        session."""
        if self._steps:
            raise EnvironmentFailed(f"{len(self._steps)} episodes wait for child sessions", fix="save the others' state later")
        open_ = cast("dict[tuple[str, int], Any]", self._open)
        return {"episodes": [[key, sample, episode.state_dict()] for (key, sample), episode in open_.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make instances with these states."""
        self._open.clear()
        self.add_state_dict(state)

    def add_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make further instances with these states."""
        for key, sample, saved in state["episodes"]:
            episode = self._make()
            cast(Any, episode).load_state_dict(saved)
            self._open[key, sample] = episode

    def between_turns(self, key: str, sample: int) -> SingleEpisode | None:
        """The instance of an episode that waits for its next turn."""
        return None if (key, sample) in self._steps else self._open.get((key, sample))

    async def _reset(self, task: Task) -> Observation | Refusal:
        keys = [(task.key, sample) for sample in task.samples]
        await self.close(keys)
        first: Observation | Refusal | None = None
        try:
            for key in keys:
                episode = self._open[key] = self._make()
                of = f"`{type(episode).__name__}.reset`"
                answer = await awaited(episode.reset(task))
                found = answer if isinstance(answer, Refusal) else observation_of(answer, of)
                if isinstance(found, Refusal):
                    await self.close(keys)
                    return found
                if first is not None and not same(first, found):
                    raise EnvironmentBadResult(
                        f"{of} gave two samples of a task different observations",
                        fix="make it depend on `task.row_json` and `task.seed` only",
                    )
                first = found
        except BaseException:
            await self.close(keys)
            raise
        assert first is not None, "a task has samples"
        return first

    async def _step(self, turn: Turn) -> Any:
        key = turn.task.key, turn.sample
        episode, step = self._open.get(key), self._steps.pop(key, None)
        if episode is None or (step is None and turn.replies):
            raise EnvironmentFailed(f"sample {turn.sample} of {turn.task.key} has no open episode: its process has ended")
        if step is None:
            answer = episode.step(turn)
            if not inspect.isawaitable(answer):
                return await self._ended(key, answer)
            step = _Step(asyncio.ensure_future(answer), episode.sessions)
        else:
            step.sessions.answer(turn.replies)
        if await step.asks():
            self._steps[key] = step
            return step.sessions.taken()
        answer = step.call.result()
        if isinstance(answer, Result) and (rewards := step.sessions.rewards()):
            answer = replace(answer, child_rewards={**rewards, **answer.child_rewards})
        return await self._ended(key, answer)

    async def _ended(self, key: tuple[str, int], answer: Any) -> Any:
        if isinstance(answer, Result):
            await self.close([key])
        return answer


@dataclass(frozen=True, slots=True)
class _Step:
    """A call of ``step`` that may ask child sessions."""

    call: asyncio.Future[Any]
    sessions: Sessions

    async def asks(self) -> bool:
        """Whether the call asks a session before it ends."""
        asked = asyncio.create_task(self.sessions.asked())
        try:
            await asyncio.wait({self.call, asked}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.cancel()
            raise
        finally:
            asked.cancel()
        return not self.call.done()

    async def cancel(self) -> None:
        """Cancel the call, and wait until it has ended."""
        self.call.cancel()
        await asyncio.wait({self.call})


async def awaited(value: Any) -> Any:
    """The value, awaited if it can be."""
    return await value if inspect.isawaitable(value) else value
