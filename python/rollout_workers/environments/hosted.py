"""Environments in child processes: a user's class, or one whose packages need an interpreter of
their own. They may hang, crash, print, or block their interpreter."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from blake3 import blake3

from rollout.environment import Answer, Observation, Refusal, Result, Task, Turn, failed, reason_of
from rollout.errors import RolloutError
from rollout.hosting import wire
from rollout.hosting.child import ChildProcess
from rollout.hosting.host import NO_DEADLINE, Source
from rollout.hosting.supervised import SupervisedSidecar, Verify, unpinned
from rollout.plugin.v1 import plugin_pb2 as pb

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_PROCESSES = min(4, os.cpu_count() or 1)


class Hosted:
    """An environment whose tasks are divided among child processes. The caller sets the deadlines:
    a cancelled call that does not end within two seconds ends its process, and with it the open
    episodes there."""

    def __init__(
        self,
        source: Source,
        *,
        processes: int = _PROCESSES,
        command: Sequence[str] = (sys.executable,),
        verify: Verify = unpinned,
        sidecar: SupervisedSidecar | None = None,
    ) -> None:
        """source: of an environment. command: the Python interpreter. verify: called before a
        process starts; raises if the source has changed. sidecar: runs the environment instead."""
        self.name = source["plugin"]
        self.batched, self.waits_for_siblings = True, False
        self.saves_episodes = False
        self._states: dict[tuple[str, int], bytes] = {}  # of open episodes, after their last turn
        self._class = self.name.rpartition(":")[2]
        self._verify = verify
        self._children = (
            [_Child(sidecar, verify)]
            if sidecar is not None
            else [_Child(ChildProcess([source], command), verify) for _ in range(processes)]
        )
        self._of: dict[str, _Home] = {}  # of each task with open episodes

    async def start(self) -> None:
        """Start the processes. Raises ``RolloutError``."""
        await self._verify()
        handshakes = await asyncio.gather(*(child.process.start() for child in self._children))
        named = [info for info in handshakes[0].plugins if info.kind == pb.PLUGIN_KIND_ENVIRONMENT and info.name == self._class]
        info = named[0]
        self.batched, self.waits_for_siblings = not info.one_at_a_time, info.waits_for_siblings
        self.saves_episodes = info.saves_episodes

    async def shutdown(self) -> None:
        """Kill the processes."""
        for child in self._children:
            await child.process.close()

    async def reset(self, tasks: Sequence[Task]) -> list[Observation | Refusal]:
        """The first observation of each task. An error of a process refuses its tasks alone."""

        async def begin(child: _Child, some: list[Task]) -> list[Observation | Refusal]:
            request = pb.ResetEnvironmentRequest(plugin=self._class, tasks=[wire.task_to(task) for task in some])
            try:
                answer = await child.call("ResetEnvironment", request)
            except wire.EnvironmentExited:  # perhaps because of another episode
                answer = await child.call("ResetEnvironment", request)
            starts = [wire.start_from(start) for start in answer.starts]
            for task, start in zip(some, starts, strict=True):
                if not isinstance(start, Refusal):
                    self._of[task.key] = _Home(child, child.starts, set(task.samples))
            return starts

        def refusal(error: Exception) -> Observation | Refusal:
            return Refusal(reason_of(error, "ENVIRONMENT_FAILED"), str(error))

        return await self._divided(tasks, lambda task: self._child(task.key), begin, refusal)

    async def step(self, turns: Sequence[Turn]) -> list[Answer]:
        """The answer to each turn. An error of a process fails its turns alone."""

        async def answer(child: _Child, some: list[Turn]) -> list[Answer]:
            lost = [self._lost(turn.task.key) for turn in some]
            if any(lost):
                message = f"the process of `{self._class}` has ended, and with it this episode"
                gone = Result(outcome="infra_failed", reason=wire.EnvironmentExited.reason, message=message)
                left = iter(await answer(child, [turn for turn, is_lost in zip(some, lost, strict=True) if not is_lost]))
                return [gone if is_lost else next(left) for is_lost in lost]
            if not some:
                return []
            request = pb.StepEnvironmentRequest(
                plugin=self._class, turns=[wire.turn_to(turn) for turn in some], save=self.saves_episodes
            )
            answered = await child.call("StepEnvironment", request)
            for turn, state in zip(some, answered.states, strict=False):
                self._states[turn.task.key, turn.sample] = state
            return [wire.answer_from(each) for each in answered.answers]

        def failure(error: Exception) -> Answer:
            return replace(failed(reason_of(error, "ENVIRONMENT_FAILED")), message=str(error))

        answers = await self._divided(turns, lambda turn: self._child(turn.task.key), answer, failure)
        for turn, each in zip(turns, answers, strict=True):
            if isinstance(each, Result):
                self._forget(turn.task.key, turn.sample)
        return answers

    async def close(self, episodes: Sequence[tuple[str, int]]) -> None:
        """Release these episodes, unless their process has ended. An error of a process is
        logged."""

        async def release(child: _Child, some: list[tuple[str, int]]) -> list[None]:
            for key, sample in some:
                self._forget(key, sample)
            if not child.process.broken:
                keys = [pb.EpisodeKey(task=key, sample=sample) for key, sample in some]
                await child.call("CloseEnvironment", pb.CloseEnvironmentRequest(plugin=self._class, episodes=keys))
            return [None] * len(some)

        def warn(error: Exception) -> None:
            log.warning("%s failed to close episodes: %s", self.name, error)

        await self._divided(episodes, lambda episode: self._child(episode[0]), release, warn)

    def saved(self, key: str, sample: int) -> bytes:
        """The state of an episode after its last turn, as JSON; empty if it can't be saved."""
        return self._states.get((key, sample), b"")

    async def add(self, key: str, states: Mapping[int, bytes]) -> None:
        """Add saved episodes of a task by sample. Raises ``RolloutError``."""
        child = self._child(key)
        episodes = [[key, sample, json.loads(state)] for sample, state in states.items()]
        data = json.dumps({"episodes": episodes}).encode()
        await child.call("LoadEnvironment", pb.LoadEnvironmentRequest(plugin=self._class, state=data, add=True))
        home = self._of.get(key)
        if home is None or home.child.process.broken or home.starts != child.starts:
            home = self._of[key] = _Home(child, child.starts, set())
        home.open.update(states)
        self._states.update(((key, sample), state) for sample, state in states.items())

    def _lost(self, key: str) -> bool:
        """Whether the process of a task has ended since its reset."""
        home = self._of.get(key)
        return home is None or home.child.process.broken or home.starts != home.child.starts

    def _forget(self, key: str, sample: int) -> None:
        self._states.pop((key, sample), None)
        home = self._of.get(key)
        if home is not None:
            home.open.discard(sample)
            if not home.open:
                del self._of[key]

    def _child(self, key: str) -> _Child:
        return self._children[blake3(key.encode()).digest()[0] % len(self._children)]

    async def _divided(
        self,
        items: Sequence[Any],
        child_of: Callable[[Any], _Child],
        call: Callable[[_Child, list[Any]], Coroutine[Any, Any, list[_T]]],
        answer_of: Callable[[Exception], _T],
    ) -> list[_T]:
        """Call each process once with its items, and return the answers in the order of the items.
        answer_of: the answer to each item of a call that raised."""
        places: dict[_Child, list[int]] = {}
        for place, item in enumerate(items):
            places.setdefault(child_of(item), []).append(place)
        calls = (call(child, [items[i] for i in at]) for child, at in places.items())
        found: dict[int, _T] = {}
        for at, answers in zip(places.values(), await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(answers, Exception):
                if not isinstance(answers, RolloutError):
                    log.error("a process of `%s` could not be called", self._class, exc_info=answers)
                answers = [answer_of(answers)] * len(at)
            elif isinstance(answers, BaseException):  # a cancelled call
                raise answers
            found.update(zip(at, answers, strict=True))
        return [found[place] for place in range(len(items))]


@dataclass(slots=True)
class _Home:
    """Where a task is. starts: of the process at the reset. open: samples."""

    child: _Child
    starts: int
    open: set[int]


class _Child:
    """A process, and how often it was started again."""

    def __init__(self, process: ChildProcess | SupervisedSidecar, verify: Verify) -> None:
        self.process, self._verify = process, verify
        self.starts = 0
        self._starting: asyncio.Task[None] | None = None

    async def call(self, method: str, request: Any) -> Any:
        if self.process.broken:
            if self._starting is None or self._starting.done():
                self._starting = asyncio.create_task(self._start(), name="environment")
            await asyncio.shield(self._starting)  # a call that is cancelled does not end the start
        return await self.process.call(method, request, NO_DEADLINE)

    async def _start(self) -> None:
        await self._verify()
        await self.process.start()
        self.starts += 1
