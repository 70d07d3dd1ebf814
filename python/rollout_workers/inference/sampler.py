"""Samples work items and publishes the trajectories to the stream."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
from opentelemetry.context import Context

from rollout import names
from rollout.buffer.v1.buffer_pb2 import GetMissingRequest, GroupKey
from rollout.buffer.v1.buffer_pb2_grpc import BufferServiceStub
from rollout.environment import Result, Task
from rollout.run.v1.run_pb2 import PromptGroup
from rollout.trajectory.v1.trajectory_pb2 import Outcome, TrajectoryEnvelope
from rollout_workers.data.rows import Rows
from rollout_workers.environments.episode import Kept
from rollout_workers.inference.artifact import move_out
from rollout_workers.inference.checkpoints import Checkpoints
from rollout_workers.inference.encode import encode_group, encode_row, in_messages, large
from rollout_workers.inference.puller import Puller
from rollout_workers.inference.receipt import EngineReceipts
from rollout_workers.inference.throughput import Throughput
from rollout_workers.worker.discovery import Services, call
from rollout_workers.worker.publisher import Publisher
from rollout_workers.worker.spec import Identity
from rollout_workers.worker.status import disk_full
from rollout_workers.worker.stream import WorkItem
from rollout_workers.worker.telemetry import Meters, distinct, incoming, outgoing, span

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why samples can't be published. since: of the first failure in a row, in seconds since 1970.
    full: whether a disk is full. fix: for it."""

    message: str
    since: float
    full: bool
    fix: str = ""


_MOST_FAILURES = 4096


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the last attempt of a group failed on this worker. message: for people, with file and
    line if they are known. since: in seconds since 1970. count: attempts that failed for this
    reason in a row."""

    reason: str
    message: str
    since: float
    count: int


class Failures:
    """The groups whose last attempt on this worker failed, by position. It keeps the newest."""

    def __init__(self) -> None:
        self._of: dict[int, Failure] = {}

    def add(self, position: int, group: Finished) -> None:
        """Record how a group ended. What was known of it is dropped if no sample failed."""
        before = self._of.pop(position, None)
        results = (episode.result for episode in group.episodes)
        failed = next((result for result in results if result is not None and result.outcome == "infra_failed"), None)
        if failed is not None:
            count = 1 + (before.count if before is not None and before.reason == failed.reason else 0)
            self._of[position] = Failure(failed.reason, failed.message, time.time(), count)
            if len(self._of) > _MOST_FAILURES:
                del self._of[next(iter(self._of))]

    def items(self) -> list[tuple[int, Failure]]:
        """The failures with the positions of their groups."""
        return list(self._of.items())


class Outlet:
    """Publishes envelopes, then acknowledges the items that they complete. Envelopes that arrive
    during a publish are sent together afterwards, so they share the stream's fsync."""

    def __init__(
        self,
        publisher: Publisher,
        services: Services,
        throughput: Throughput,
        puller: Puller,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        """checkpoints: None if episodes are not saved."""
        self._checkpoints = checkpoints
        self._publisher, self._services, self._throughput, self._puller = publisher, services, throughput, puller
        self._meters = Meters()
        self._waiting: list[_Parcel] = []
        self._leaving: list[_Parcel] = []  # that are being published
        self._task: asyncio.Task[None] | None = None
        self._refusal: Refusal | None = None

    def send(self, items: Sequence[WorkItem], envelopes: Sequence[TrajectoryEnvelope]) -> None:
        """Publish in the background. Items whose envelopes can't be published, for example because
        the storage service rejects a payload, go back to the queue."""
        self._waiting.append(_Parcel(items, envelopes, outgoing()))
        if self._task is None:
            self._task = asyncio.create_task(self._send_all(), name="publish")

    def unsent(self) -> dict[str, float]:
        """When each item that is not acknowledged was sent, by its key, in seconds since 1970."""
        return {item.key: parcel.since for parcel in (*self._leaving, *self._waiting) for item in parcel.items}

    def refused(self) -> Refusal | None:
        """Why the last publish failed; None if it did not."""
        return self._refusal

    async def drain(self) -> None:
        """Return when everything that was sent is published and acknowledged."""
        while self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def stop(self) -> None:
        """Cancel publishing. The items are delivered again."""
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
        await self.drain()

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                self._leaving, self._waiting = self._waiting, []
                await self._publish(self._leaving)
        finally:
            self._leaving = []
            self._task = None

    async def _publish(self, parcels: list[_Parcel]) -> None:
        items = [item for parcel in parcels for item in parcel.items]
        envelopes = [envelope for parcel in parcels for envelope in parcel.envelopes]
        began = time.monotonic()
        try:
            for envelope in large(envelopes):
                await move_out(envelope, self._services)
            for batch in in_messages(envelopes, self._publisher.most_bytes):
                with span("publish", distinct(incoming(parcel.headers) for parcel in parcels), groups=len(items)):
                    await self._publisher.publish(batch.SerializeToString(), outgoing())
        except Exception as error:
            log.exception("%d groups could not be published; returning them to the queue", len(items))
            self._refusal = _refusal(error, self._refusal)
            if self._checkpoints is not None:
                self._checkpoints.forget(items)
            await self._puller.drop(items)
            return
        self._refusal = None
        await self._puller.done(items)
        if self._checkpoints is not None:
            self._checkpoints.end(items)
        tokens = sum(envelope.header.completion_tokens for envelope in envelopes)
        self._throughput.add(len(envelopes), tokens)
        self._meters.publish_seconds.record(time.monotonic() - began)
        ends = Counter(
            (Outcome.Name(envelope.header.outcome)[len("OUTCOME_") :], envelope.header.reason) for envelope in envelopes
        )
        for (outcome, reason), count in ends.items():
            self._meters.samples.add(count, {"outcome": outcome, "reason": reason})
        self._meters.tokens.add(tokens)


def _refusal(error: Exception, before: Refusal | None) -> Refusal:
    full, message, fix = isinstance(error, OSError) and error.errno == errno.ENOSPC, str(error), ""
    if full:
        message, fix = disk_full(error)
    if isinstance(error, grpc.aio.AioRpcError):
        full, message = error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, error.details() or error.code().name
    return Refusal(message, before.since if before else time.time(), full, fix)


@dataclass(frozen=True, slots=True)
class _Parcel:
    items: Sequence[WorkItem]
    envelopes: Sequence[TrajectoryEnvelope]
    headers: dict[str, str]
    since: float = field(default_factory=time.time)


class GroupRunner(Protocol):
    """Samples tasks: an ``EpisodeRunner``, or one with its interface."""

    @property
    def saves_episodes(self) -> bool: ...
    def run(self, tasks: Sequence[Task], kept: Sequence[Kept] = ()) -> AsyncGenerator[Sequence[Finished], None]: ...
    def doing(self) -> dict[str, tuple[str, float]]: ...


class Ended(Protocol):
    """An episode that has a result."""

    @property
    def result(self) -> Result | None: ...


class Finished(Protocol):
    """A task whose samples are all finished."""

    @property
    def task(self) -> Task: ...
    @property
    def episodes(self) -> Sequence[Ended]: ...


class Sampler:
    """Samples items with the engine. Each batch is a separate task."""

    def __init__(
        self,
        who: Identity,
        runner: GroupRunner,
        receipts: EngineReceipts,
        outlet: Outlet,
        services: Services,
        puller: Puller,
        min_group_size: int = 0,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        """min_group_size: ``limits.min_group_size``. checkpoints: None if episodes are not
        saved."""
        self._checkpoints = checkpoints
        self._who, self._runner, self._receipts, self._min_group_size = who, runner, receipts, min_group_size
        self._outlet, self._services, self._puller = outlet, services, puller
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures = Failures()

    def begin(self, items: list[WorkItem]) -> None:
        """Sample these items in the background."""
        task = asyncio.create_task(self._work(items), name="sample")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self) -> None:
        """Return when all items are sampled, published, and acknowledged."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._outlet.drain()

    def doing(self) -> dict[str, tuple[str, float]]:
        """What is done for each item that is being sampled (:meth:`EpisodeRunner.doing`)."""
        return self._runner.doing()

    def unsent(self) -> dict[str, float]:
        """The items that are being published (:meth:`Outlet.unsent`)."""
        return self._outlet.unsent()

    def refused(self) -> Refusal | None:
        """Why the last publish failed (:meth:`Outlet.refused`)."""
        return self._outlet.refused()

    def failures(self) -> list[tuple[int, Failure]]:
        """Why groups failed, by position (:meth:`Failures.items`)."""
        return self._failures.items()

    async def stop(self) -> None:
        """Cancel all tasks. Their items are delivered again."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._outlet.stop()

    async def _work(self, items: list[WorkItem]) -> None:
        with span("sample", _callers(items), groups=len(items)):
            left = {item.key: item for item in items}
            try:
                tasks = await self._tasks_of(items, left)
                kept = await self._kept(list(left.values()), tasks)
                async with aclosing(self._runner.run(tasks, kept)) as finished:
                    async for groups in finished:
                        await self._receipts.settled()
                        await self._send([left[group.task.key] for group in groups], groups)
                        for group in groups:
                            del left[group.task.key]
            except Exception:
                log.exception("%d groups could not be sampled; returning them to the queue", len(left))
                if self._checkpoints is not None:
                    self._checkpoints.forget(left.values())
                await self._puller.drop(list(left.values()))

    async def _kept(self, items: list[WorkItem], tasks: list[Task]) -> list[Kept]:
        """The episodes of these tasks that another worker saved."""
        if self._checkpoints is None or not tasks or not self._runner.saves_episodes:
            return []
        return await self._checkpoints.begin(items, tasks)

    async def _send(self, items: list[WorkItem], groups: Sequence[Finished]) -> None:
        envelopes: list[TrajectoryEnvelope] = []
        for item, group in zip(items, groups, strict=True):
            self._failures.add(item.group.position, group)
            envelopes += await self.encode(item.group, group)
        self._outlet.send(items, envelopes)

    async def encode(self, group: PromptGroup, finished: Any) -> list[TrajectoryEnvelope]:
        """The envelopes of a group, with the receipts at the time of the call."""
        return encode_group(group, finished, self._receipts, self._who.worker, self._min_group_size)

    async def _tasks_of(self, items: list[WorkItem], left: dict[str, WorkItem]) -> list[Task]:
        """The items as tasks. For a redelivered item the task has only the samples that the buffer
        does not have; an item without missing samples is acknowledged."""
        missing = await self._missing([item for item in items if item.deliveries > 1])
        tasks: list[Task] = []
        complete: list[WorkItem] = []
        for item in items:
            seeds = tuple(item.group.seeds)
            samples = missing.get(item.key, range(item.group.group_size))
            if not samples:
                complete.append(left.pop(item.key))
                continue
            tasks.append(
                Task(
                    key=item.key,
                    row_json=item.group.row_json,
                    samples=tuple(samples),
                    seeds=tuple(seeds[sample] for sample in samples),
                    row=item.group.row,
                )
            )
        if complete:
            await self._puller.done(complete)
            if self._checkpoints is not None and self._runner.saves_episodes:
                self._checkpoints.end(complete, known=False)
        return tasks

    async def _missing(self, items: list[WorkItem]) -> dict[str, list[int]]:
        """The samples that the buffer does not have, by item; empty if the buffer can't be reached,
        because it drops duplicates."""
        if not items:
            return {}
        keys = [GroupKey(epoch=i.group.epoch, index=i.group.index, attempt=i.group.attempt) for i in items]
        request = GetMissingRequest(run_id=self._who.run, groups=keys)
        try:
            answer = await call(self._services, names.BUFFER_SERVICE, BufferServiceStub, "GetMissing", request, tries=3)
        except Exception as error:
            log.warning(
                "can't get the missing samples of %d redelivered groups from the buffer (%s); sampling all", len(items), error
            )
            return {}
        return {item.key: list(group.samples) for item, group in zip(items, answer.groups, strict=True)}


def _callers(items: Sequence[WorkItem]) -> Iterator[Context]:
    """The distinct trace contexts of the items."""
    return map(incoming, {item.headers.get("traceparent"): item.headers for item in items}.values())


class RowSender:
    """Sends rows as examples, for algorithms that train on data. Nothing is sampled."""

    def __init__(self, who: Identity, rows: Rows, outlet: Outlet) -> None:
        self._who, self._rows, self._outlet = who, rows, outlet

    def begin(self, items: list[WorkItem]) -> None:
        """Send the rows of these items."""
        with span("send rows", _callers(items), groups=len(items)):
            made = self._rows.examples([item.group.row_json for item in items])
            envelopes = [encode_row(item.group, row, self._who.worker) for item, row in zip(items, made, strict=True)]
            self._outlet.send(items, [envelope for row in envelopes for envelope in row])

    def doing(self) -> dict[str, tuple[str, float]]:
        """Nothing is sampled."""
        return {}

    def unsent(self) -> dict[str, float]:
        """The items that are being published (:meth:`Outlet.unsent`)."""
        return self._outlet.unsent()

    def refused(self) -> Refusal | None:
        """Why the last publish failed (:meth:`Outlet.refused`)."""
        return self._outlet.refused()

    def failures(self) -> list[tuple[int, Failure]]:
        """Nothing is sampled, so nothing fails."""
        return []

    async def drain(self) -> None:
        """Return when all rows are published and acknowledged."""
        await self._outlet.drain()

    async def stop(self) -> None:
        """Cancel publishing. The items are delivered again."""
        await self._outlet.stop()
