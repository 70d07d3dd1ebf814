"""Rewards, scored in a process of their own.

A reward is the user's code: it may hang, crash, print, or hold the interpreter for seconds. In its own process none of that
reaches the sampling loop, and a call that takes too long is ended for good. Whatever goes wrong makes the samples
INFRA_FAILED with a reason; it never makes a reward of 0.

Groups that finish while a call runs are scored together by the next call. When a call for several groups fails, each group is
called alone, so a bad sample costs its own group only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout.plugin import RewardError
from rollout_workers.harness.environment import Result, failed, reason_of
from rollout_workers.harness.reward_client import RewardProcess

log = logging.getLogger(__name__)

_PROCESSES = 4
_MOST_GROUPS = 4096


@dataclass(frozen=True, slots=True)
class RewardGroup:
    """Samples of one row: (prompt, completion) each."""

    row_json: bytes
    samples: tuple[tuple[str, str], ...]


@dataclass(slots=True)
class _Waiting:
    group: RewardGroup
    done: asyncio.Future[list[Result]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Rewards:
    """Scores groups with a plugin. Belongs to one event loop."""

    def __init__(self, plugin: str, base_dir: str, *, timeout_seconds: float, retries: int) -> None:
        """plugin: ``file.py:function``. timeout_seconds: of one call. retries: further tries of a failed call."""
        self._plugin, self._base_dir = plugin, base_dir
        self._timeout, self._retries = timeout_seconds, retries
        self._waiting: deque[_Waiting] = deque()
        self._most_groups = _MOST_GROUPS
        self._idle: list[RewardProcess] = []
        self._slots = asyncio.Semaphore(_PROCESSES)
        self._caller: asyncio.Task[None] | None = None
        self._isolating: set[asyncio.Task[None]] = set()
        self.failures = 0  # samples that no try could score
        self.retries = 0  # calls that were repeated after a failure

    async def start(self) -> None:
        """Start the process and import the plugin. Raises ``RewardImportError`` or ``RewardTimeout``."""
        self._idle.append(await RewardProcess.start(self._plugin, self._base_dir))

    async def score(self, groups: Sequence[RewardGroup]) -> list[list[Result]]:
        """One list of results a group, in order."""
        waiting = [_Waiting(group) for group in groups]
        self._waiting.extend(waiting)
        if self._caller is None:
            self._caller = asyncio.create_task(self._call_all(), name="rewards")
        return [await w.done for w in waiting]

    async def close(self) -> None:
        """End the processes; whoever waits gets REWARD_CLOSED."""
        tasks = [t for t in (self._caller, *self._isolating) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for waiting in self._waiting:
            _settle(waiting, [failed("REWARD_CLOSED")] * len(waiting.group.samples))
        self._waiting.clear()
        for process in self._idle:
            process.kill()
        self._idle.clear()

    async def _call_all(self) -> None:
        """Score what waits, a batch a call, until nothing does."""
        try:
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._most_groups))]
                try:
                    results = await self._call([w.group for w in batch])
                except RewardError as error:
                    self._split(batch, error)
                except BaseException:
                    for w in batch:
                        _settle(w, [failed("REWARD_CLOSED")] * len(w.group.samples))
                    raise
                else:
                    for w, scored in zip(batch, results, strict=True):
                        _settle(w, scored)
        finally:
            self._caller = None

    def _split(self, batch: list[_Waiting], error: RewardError) -> None:
        """Call each group of a failed batch alone; the first try counts where it was alone already."""
        if error.reason == "REWARD_TIMEOUT" and len(batch) > 1:
            self._most_groups = max(1, len(batch) // 2)  # it may just be slow
        used = 1 if len(batch) == 1 else 0
        for w in batch:
            task = asyncio.create_task(self._isolate(w, error, used), name="reward retry")
            self._isolating.add(task)
            task.add_done_callback(self._isolating.discard)

    async def _isolate(self, waiting: _Waiting, error: RewardError, used: int) -> None:
        first = error
        try:
            for _ in range(used, self._retries + 1):
                self.retries += 1
                try:
                    [results] = await self._call([waiting.group])
                except RewardError as again:
                    error = again
                else:
                    _settle(waiting, results)
                    log.warning("a reward failed and was scored by another try: %s", first)
                    return
            self.failures += len(waiting.group.samples)
            log.warning("a reward failed, its samples are INFRA_FAILED: %s", error)
        finally:
            _settle(waiting, [failed(reason_of(error, "REWARD_RAISED"))] * len(waiting.group.samples))

    async def _call(self, groups: list[RewardGroup]) -> list[list[Result]]:
        """One call of the function over all samples. Raises ``RewardError``."""
        async with self._slots:
            process = self._idle.pop() if self._idle else await RewardProcess.start(self._plugin, self._base_dir)
            try:
                scores = iter(await process.call([(g.row_json, g.samples) for g in groups], self._timeout))
            except BaseException:
                if process.broken:
                    process.kill()
                raise
            finally:
                if not process.broken:
                    self._idle.append(process)
            return [[Result(*next(scores)) for _ in group.samples] for group in groups]


def _settle(waiting: _Waiting, results: list[Result]) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):
        waiting.done.set_result(results)
