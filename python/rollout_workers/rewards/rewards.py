"""Scores completions in batches, with a time limit and retries.

The score comes from a :class:`RewardSource`: child processes with the user's code (``plugin``) or a
reward worker (``worker_client``). If the source fails, the samples are INFRA_FAILED with a reason;
a failure never becomes a reward of 0.

Groups that finish during a call are scored together by the next call. If a call for several groups
fails, each group is scored by a separate call, so a bad sample affects its own group only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from opentelemetry.context import Context, get_current

from rollout.environment import Result, failed, reason_of
from rollout.plugin import RewardError, Score
from rollout_workers.worker.calls import Call, Calls
from rollout_workers.worker.telemetry import distinct

log = logging.getLogger(__name__)

_MOST_GROUPS = 4096


class Scorable(NamedTuple):
    """A completion to score. prompt_ids, token_ids: int32, little-endian, of the prompt and the
    completion."""

    prompt: str
    completion: str
    prompt_ids: bytes = b""
    token_ids: bytes = b""


@dataclass(frozen=True, slots=True)
class RewardGroup:
    """The samples of one row."""

    row_json: bytes
    samples: tuple[Scorable, ...]


class RewardSource(Protocol):
    """Computes scores. Calls may overlap."""

    async def start(self) -> None:
        """Start the source. Raises ``RewardError``."""
        ...

    async def call(self, groups: Sequence[RewardGroup], timeout: float) -> list[Score]:
        """The scores of all samples of all groups, in order. Raises ``RewardError``, at the latest
        after ``timeout`` seconds."""
        ...

    async def close(self) -> None:
        """Stop the source; idempotent."""
        ...


class Scorer(Protocol):
    """Scores the completions of an environment with one or several rewards. Belongs to one event
    loop.

    failures: number of samples that no attempt could score. retries: number of calls that were
    repeated after a failure. waiting_seconds: age of the oldest call that has not returned; 0
    without one.
    """

    @property
    def failures(self) -> int: ...

    @property
    def retries(self) -> int: ...

    @property
    def waiting_seconds(self) -> float: ...

    async def start(self) -> None:
        """Start the sources. Raises ``RewardError``."""
        ...

    async def score(self, groups: Sequence[RewardGroup]) -> list[list[Result]]:
        """One list of results per group, in order. A failure of a reward is a result, not an
        exception."""
        ...

    async def close(self) -> None:
        """Cancel all calls. Pending ones fail with REWARD_CLOSED."""
        ...


@dataclass(slots=True)
class _Waiting:
    group: RewardGroup
    caller: Context = field(default_factory=get_current)
    done: asyncio.Future[list[Result]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Rewards:
    """A :class:`Scorer` with a single source."""

    def __init__(
        self, source: RewardSource, *, timeout_seconds: float, retries: int, name: str = "", calls: Calls | None = None
    ) -> None:
        """timeout_seconds: of one call. retries: how often a failed call is repeated. name: of the
        reward, in calls. calls: where its open calls are recorded."""
        self._source, self._name, self._open = source, name, calls or Calls()
        self._timeout, self._retries = timeout_seconds, retries
        self._waiting: deque[_Waiting] = deque()
        self._most_groups = _MOST_GROUPS
        self._caller: asyncio.Task[None] | None = None
        self._isolating: set[asyncio.Task[None]] = set()
        self._calls: dict[object, float] = {}  # when each call in progress began
        self.failures = 0  # samples that no attempt could score
        self.retries = 0  # calls that were repeated after a failure

    @property
    def waiting_seconds(self) -> float:
        return time.monotonic() - min(self._calls.values()) if self._calls else 0.0

    async def start(self) -> None:
        """Start the source. Raises ``RewardError``."""
        await self._source.start()

    async def score(self, groups: Sequence[RewardGroup]) -> list[list[Result]]:
        """One list of results per group, in order."""
        waiting = [_Waiting(group) for group in groups]
        self._waiting.extend(waiting)
        if self._caller is None:
            self._caller = asyncio.create_task(self._call_all(), name="rewards")
        return [await w.done for w in waiting]

    async def close(self) -> None:
        """Stop the source; pending calls fail with REWARD_CLOSED."""
        tasks = [t for t in (self._caller, *self._isolating) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for waiting in self._waiting:
            _settle(waiting, [failed("REWARD_CLOSED")] * len(waiting.group.samples))
        self._waiting.clear()
        await self._source.close()

    async def _call_all(self) -> None:
        """Score the waiting groups, one batch per call, until none waits."""
        try:
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._most_groups))]
                try:
                    results = await self._call(batch)
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
        """Score each group of a failed batch by a separate call. If the batch was a single group,
        the failed call counts as its first attempt."""
        if error.reason == "REWARD_TIMEOUT" and len(batch) > 1:
            self._most_groups = max(1, len(batch) // 2)  # the batch may only have been too large for the time limit
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
                    [results] = await self._call([waiting])
                except RewardError as again:
                    error = again
                else:
                    _settle(waiting, results)
                    log.warning("a reward failed, but a retry succeeded: %s", first)
                    return
            self.failures += len(waiting.group.samples)
            log.warning("a reward failed; its samples are INFRA_FAILED: %s", error)
        finally:
            _settle(waiting, [failed(reason_of(error, "REWARD_RAISED"), str(error))] * len(waiting.group.samples))

    async def _call(self, batch: list[_Waiting]) -> list[list[Result]]:
        """Call the source once for all samples. Raises ``RewardError``."""
        groups = [waiting.group for waiting in batch]
        call = object()
        self._calls[call] = time.monotonic()
        try:
            rows = tuple(group.row_json for group in groups)
            callers = distinct(waiting.caller for waiting in batch)
            with self._open.open(Call("REWARD_CALL", self._name, rows, self._timeout, callers)):
                scores = await self._source.call(groups, self._timeout)
        finally:
            del self._calls[call]
        made = {id(score): score for score in scores}  # samples may share an object
        results = {at: _result(score) for at, score in made.items()}
        each = iter(scores)
        return [[results[id(next(each))] for _ in group.samples] for group in groups]


def _result(score: Score) -> Result:
    return Result(score.reward, score.metrics, token_rewards=tuple(score.token_rewards), steps=tuple(score.steps))


def _settle(waiting: _Waiting, results: list[Result]) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):
        waiting.done.set_result(results)
