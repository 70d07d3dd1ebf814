"""Saves open episodes after each turn in the snapshot service, and continues those of a worker that
died."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from google.protobuf.timestamp_pb2 import Timestamp

from rollout import names
from rollout.environment import Observation, Result, Task
from rollout.run.v1.run_pb2 import PromptGroup
from rollout.snapshot.v1 import snapshot_pb2 as pb
from rollout.snapshot.v1.snapshot_pb2_grpc import SnapshotServiceStub
from rollout.trajectory.v1 import trajectory_pb2
from rollout_workers.engines.base import SampleOutput, VersionSpan
from rollout_workers.environments.episode import Clock, Episode, FinishedGroup, Kept
from rollout_workers.inference.encode import encode_group
from rollout_workers.inference.receipt import EngineReceipts
from rollout_workers.worker.discovery import Services, call
from rollout_workers.worker.spec import Identity
from rollout_workers.worker.stream import WorkItem

log = logging.getLogger(__name__)

_MOST_BYTES = 16 << 20
"""About the largest request."""


class Checkpoints:
    """The saved episodes of a worker's groups. Saves wait for nothing: turns that end during a save
    are saved together afterwards, each episode once. All methods run on one event loop."""

    def __init__(self, who: Identity, services: Services, receipts: EngineReceipts) -> None:
        self._who, self._services, self._receipts = who, services, receipts
        self._groups: dict[str, PromptGroup] = {}  # that are being sampled, by the key of the task
        self._unsaved: dict[tuple[str, int], tuple[Episode, bytes]] = {}
        self._saved: set[str] = set()  # groups with saved episodes
        self._ended: dict[str, pb.EpisodeGroup] = {}
        self._task: asyncio.Task[None] | None = None

    def keep(self, episode: Episode, state: bytes) -> None:
        """Save an episode after a turn, in the background."""
        if episode.task.key in self._groups:
            seen = copy.copy(episode)  # as it is now
            seen.parts, seen.texts, seen.rewards = list(episode.parts), list(episode.texts), list(episode.rewards)
            seen.said, seen.turn_metrics, seen.clocks = list(episode.said), list(episode.turn_metrics), list(episode.clocks)
            self._unsaved[episode.key] = seen, state
            self._soon()

    async def begin(self, items: Sequence[WorkItem], tasks: Sequence[Task]) -> list[Kept]:
        """Expect the episodes of these items. Returns those that an earlier worker saved; none if
        the service can't be reached, so that they begin again."""
        self._groups.update((item.key, item.group) for item in items)
        request = pb.ListEpisodesRequest(run_id=self._who.run, groups=[_group(item.group) for item in items])
        try:
            found = await self._call("ListEpisodes", request)
        except Exception as error:
            log.warning("can't get the saved episodes of %d groups (%s); they begin again", len(items), error)
            return []
        by_key = {(task.key, sample): task for task in tasks for sample in task.samples}
        kept: list[Kept] = []
        for saved in found.episodes:
            key = next((i.key for i in items if _same(i.group, saved.key)), "")
            self._saved.update([key] if key else [])
            if (task := by_key.get((key, saved.key.sample))) is None:
                continue
            try:
                kept.append(Kept(decode(saved, task), saved.environment_state))
            except Exception as error:  # its group would fail here on every worker
                log.warning("saved sample %d of %s can't be read (%r); it begins again", saved.key.sample, key, error)
                continue
            for span in saved.trajectory.version_spans:
                self._receipts.remember(span.version, span.digest)
        if kept:
            log.info("%d episodes of %d groups continue after their last saved turn", len(kept), len(items))
        return kept

    def forget(self, items: Iterable[WorkItem]) -> None:
        """Keep what is saved of groups that are given back."""
        for item in items:
            self._groups.pop(item.key, None)
            self._saved.discard(item.key)
            self._unsaved = {of: each for of, each in self._unsaved.items() if of[0] != item.key}

    def end(self, items: Iterable[WorkItem], *, known: bool = True) -> None:
        """Delete the saved episodes of groups that have ended, in the background. known: whether
        ``begin`` was called for them, so that groups without saved episodes need no call."""
        for item in items:
            saved = item.key in self._saved or not known
            self.forget([item])
            if saved:
                self._ended[item.key] = _group(item.group)
        if self._ended:
            self._soon()

    async def drain(self) -> None:
        """Return when everything is saved or deleted."""
        while self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def _soon(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="checkpoints")

    async def _run(self) -> None:
        try:
            while self._unsaved or self._ended:
                await self._save()
                await self._drop()
        finally:
            self._task = None

    async def _save(self) -> None:
        request, size = pb.SaveEpisodesRequest(run_id=self._who.run), 0
        while self._unsaved and size < _MOST_BYTES:
            (key, _), (episode, state) = self._unsaved.popitem()
            self._saved.add(key)
            request.episodes.append(encode(self._groups[key], episode, state, self._receipts, self._who.worker))
            size += request.episodes[-1].ByteSize()
        if not request.episodes:
            return
        try:
            await self._call("SaveEpisodes", request)
        except Exception as error:
            lost = len(request.episodes)
            log.warning("%d episodes could not be saved (%s); after a crash they continue at an earlier turn", lost, error)

    async def _drop(self) -> None:
        groups, self._ended = list(self._ended.values()), {}
        if not groups:
            return
        try:
            await self._call("DropEpisodes", pb.DropEpisodesRequest(run_id=self._who.run, groups=groups))
        except Exception as error:
            log.warning("the saved episodes of %d finished groups could not be deleted: %s", len(groups), error)

    async def _call(self, method: str, request: Any) -> Any:
        return await call(self._services, names.SNAPSHOT_SERVICE, SnapshotServiceStub, method, request, tries=3)


def encode(group: PromptGroup, episode: Episode, state: bytes, receipts: EngineReceipts, worker: str) -> pb.Episode:
    """The record of an open episode that ends with an observation."""
    seen = copy.copy(episode)
    seen.result = Result(metrics=episode.metrics)
    [envelope] = encode_group(group, FinishedGroup(episode.task, (seen,)), receipts, worker)
    trajectory = trajectory_pb2.Trajectory.FromString(envelope.payload)
    trajectory.outcome = trajectory_pb2.OUTCOME_UNSPECIFIED
    saved = Timestamp()
    saved.GetCurrentTime()
    return pb.Episode(
        key=envelope.header.key,
        turns=episode.turns,
        trajectory=trajectory,
        times=envelope.header.times,
        environment_state=state,
        tools=[json.dumps(dict(tool), ensure_ascii=False) for tool in episode.prompt.tools],
        texts=episode.texts,
        seed=episode.seed,
        row_json=episode.task.row_json,
        row=episode.task.row,
        worker_id=worker,
        save_time=saved,
    )


def decode(saved: pb.Episode, task: Task) -> Episode:
    """The episode of a record, of a sample of ``task``. It ends with an observation."""
    trajectory = saved.trajectory
    ids = np.frombuffer(trajectory.token_ids, "<i4").astype(np.int32)
    logprobs = np.frombuffer(trajectory.logprobs, "<f4").astype(np.float32)
    raw = np.frombuffer(trajectory.raw_logprobs, "<f4").astype(np.float32) if trajectory.raw_logprobs else None
    first, *turns = trajectory.turns
    prompt = Observation(
        token_ids=ids[: first.end],
        text=trajectory.prompt,
        messages=tuple(json.loads(message) for message in first.messages),
        tools=tuple(json.loads(tool) for tool in saved.tools),
    )
    episode = Episode(task, task.samples.index(saved.key.sample), prompt)
    episode.began = saved.times.began_unix_ms / 1000 or episode.began
    episode.metrics = dict(trajectory.metrics)
    for turn, text in zip(turns, saved.texts, strict=True):
        at = slice(turn.start, turn.end)
        messages = [json.loads(message) for message in turn.messages]
        episode.texts.append(text)
        if not turn.sampled:
            episode.parts.append(Observation(token_ids=ids[at], text=text, messages=tuple(messages)))
            continue
        spans = _within(trajectory.version_spans, turn.start - first.end, turn.end - first.end)
        output = SampleOutput("", 0, ids[at], logprobs[at], None if raw is None else raw[at], spans, "stop", text=text)
        episode.parts.append(output)
        episode.said.extend(messages)
        episode.rewards.append(turn.reward)
        episode.turn_metrics.append(dict(turn.metrics))
    for time in saved.times.turns:
        began, tools = episode.began, tuple(ms / 1000 for ms in time.tool_ms)
        episode.clocks.append(
            Clock(began + time.asked_ms / 1000, began + time.sampled_ms / 1000, began + time.answered_ms / 1000, tools)
        )
    while len(episode.clocks) < episode.turns:  # the record has no times of the last turns
        episode.clocks.append(Clock(episode.began))
    return episode


def _within(spans: Iterable[trajectory_pb2.VersionSpan], start: int, end: int) -> tuple[VersionSpan, ...]:
    """The versions of the tokens from ``start`` to ``end``, counted from ``start``."""
    cut = ((span.version, max(span.start, start) - start, min(span.end, end) - start) for span in spans)
    return tuple(VersionSpan(version, first, last) for version, first, last in cut if last > first)


def _group(group: PromptGroup) -> pb.EpisodeGroup:
    return pb.EpisodeGroup(epoch=group.epoch, index=group.index)


def _same(group: PromptGroup, key: trajectory_pb2.TrajectoryKey) -> bool:
    return (group.epoch, group.index, group.attempt) == (key.epoch, key.index, key.attempt)
