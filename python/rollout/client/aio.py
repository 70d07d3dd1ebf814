"""The asyncio client."""

from __future__ import annotations

import asyncio
import datetime
import os
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Self, cast

import grpc

from rollout.client.connection import Server, locate
from rollout.client.episodes import Episode, episodes
from rollout.client.errors import RemoteError, remote_errors
from rollout.client.planned import Outage, Planned, add_points, create_request, event_filter, over, plan_request, planned
from rollout.event.v1.event_pb2 import LEVEL_UNSPECIFIED, Event, Level
from rollout.plan.v1.plan_pb2_grpc import PlannerServiceStub
from rollout.run.v1 import run_pb2
from rollout.run.v1.run_pb2_grpc import SchedulerServiceStub
from rollout.storage.v1 import storage_pb2
from rollout.storage.v1.storage_pb2_grpc import EventServiceStub


def connect_async(
    server: str | None = None, *, token: str | None = None, state: str | os.PathLike[str] | None = None
) -> AsyncClient:
    """Connect to ``server`` (host:port), or to the local ``rolloutd`` of a state folder. Use it in
    ``async with``.

    Nothing is sent before the first call. Raises ``NoDaemon`` if no server is named and no local
    ``rolloutd`` runs.
    """
    return AsyncClient(locate(server, token, state))


class AsyncClient:
    """The calls that scripts need. Calls raise ``RemoteError``."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._channel = server.channel(grpc.aio)
        self._planner = cast(Any, PlannerServiceStub(self._channel))
        self._scheduler = cast(Any, SchedulerServiceStub(self._channel))
        self._events = cast(Any, EventServiceStub(self._channel))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection. Open streams end."""
        await self._channel.close()

    async def plan(self, config: str | os.PathLike[str], *, set: Sequence[str] = ()) -> Planned:
        """Plan a TOML file. set: overrides, ``dotted.path=TOML value``. Raises ``PlanRefused`` with
        all problems."""
        request = plan_request(config, set)
        with remote_errors():
            return planned(request, await self._planner.CreatePlan(request, metadata=self.server.metadata))

    async def submit(self, plan: Planned, *, idempotency_key: str = "", from_snapshot: str = "") -> run_pb2.Run:
        """Start a run of the plan. A repeated call with the same key returns the same run."""
        request = create_request(plan, idempotency_key, from_snapshot)
        with remote_errors():
            answer = await self._scheduler.CreateRun(request, metadata=self.server.metadata)
        return answer.run

    async def run(self, run_id: str) -> run_pb2.RunStatus:
        """A run by id, unique prefix of an id, or name."""
        with remote_errors():
            request = run_pb2.GetRunRequest(run_id=run_id)
            return (await self._scheduler.GetRun(request, metadata=self.server.metadata)).status

    async def runs(self, *, limit: int = 100) -> list[run_pb2.Run]:
        """The last runs, newest first. limit: largest number of runs."""
        found: list[run_pb2.Run] = []
        with remote_errors():
            request = run_pb2.ListRunsRequest()
            while len(found) < limit:
                request.page_size = min(limit - len(found), 1000)
                page = await self._scheduler.ListRuns(request, metadata=self.server.metadata)
                found.extend(page.runs)
                if not page.next_page_token:
                    break
                request.page_token = page.next_page_token
        return found

    async def cancel(self, run_id: str, *, drain: bool = True) -> run_pb2.Run:
        """Stop a run. drain: finish the current step and take a snapshot first."""
        with remote_errors():
            request = run_pb2.CancelRunRequest(run_id=run_id, drain=drain)
            return (await self._scheduler.CancelRun(request, metadata=self.server.metadata)).run

    async def pause(self, run_id: str) -> run_pb2.Run:
        """Issue no more work. Steps whose work was issued are finished, and the workers keep
        running. ``resume`` continues."""
        with remote_errors():
            request = run_pb2.PauseRunRequest(run_id=run_id)
            return (await self._scheduler.PauseRun(request, metadata=self.server.metadata)).run

    async def resume(self, run_id: str) -> run_pb2.Run:
        """Continue a paused, interrupted, failed, or cancelled run."""
        with remote_errors():
            request = run_pb2.ResumeRunRequest(run_id=run_id)
            return (await self._scheduler.ResumeRun(request, metadata=self.server.metadata)).run

    async def follow(self, run_id: str) -> AsyncGenerator[run_pb2.RunStatus, None]:
        """Yield the status now and on every change, until the run has ended or was paused because
        of a refused gradient. Reconnects if the server is unavailable for a short time."""
        outage = Outage()
        while True:
            stream, error = self._scheduler.WatchRun(run_pb2.WatchRunRequest(run_id=run_id), metadata=self.server.metadata), None
            try:
                with remote_errors():
                    async for update in stream:
                        outage.over()
                        yield update.status
                        if over(update.status.run):
                            return
            except RemoteError as broken:
                error = broken
            finally:
                stream.cancel()
            await asyncio.sleep(outage.pause(error))

    async def tail(
        self,
        run_id: str = "",
        *,
        kinds: Sequence[str] = (),
        services: Sequence[str] = (),
        min_level: Level.ValueType = LEVEL_UNSPECIFIED,
        since: datetime.datetime | None = None,
        after_sequence: int = 0,
    ) -> AsyncGenerator[Event, None]:
        """Yield stored events in order, then new ones, until the caller stops. After a broken
        connection it continues where it stopped: each event is yielded once. run_id: as in
        ``run``; "": events of all runs."""
        wanted, outage = event_filter(await self._id(run_id), kinds, services, min_level, since, after_sequence), Outage()
        while True:
            stream, error = (
                self._events.TailEvents(storage_pb2.TailEventsRequest(filter=wanted), metadata=self.server.metadata),
                None,
            )
            try:
                with remote_errors():
                    async for answer in stream:
                        outage.over()
                        for event in answer.events:
                            wanted.after_sequence = event.sequence
                            yield event
            except RemoteError as broken:
                error = broken
            finally:
                stream.cancel()
            await asyncio.sleep(outage.pause(error))

    def episodes(self, run_id: str, *, groups: int = 8) -> AsyncGenerator[Episode, None]:
        """Yield the samples of prompt groups of a run with `environment.kind = "external"`, group
        by group, until the run has ended. The caller plays each of them through the gateway and
        closes it; several at the same time keep the engine busy.

        groups: most groups that one call of the gateway returns. Raises ``RemoteError``. While the
        gateway is away it waits.
        """
        return episodes(self._channel, self.server, run_id, groups)

    async def metrics(self, run_id: str, names: Sequence[str] = (), *, from_step: int = 0) -> dict[str, list[tuple[int, float]]]:
        """(step, value) pairs of each metric, by name. names: which metrics; empty: all. run_id: as
        in ``run``."""
        request = storage_pb2.QueryMetricsRequest(run_id=await self._id(run_id), names=list(names), from_step=from_step)
        found: dict[str, list[tuple[int, float]]] = {}
        with remote_errors():
            while True:
                page = await self._events.QueryMetrics(request, metadata=self.server.metadata)
                add_points(found, page)
                if not page.next_page_token:
                    return found
                request.page_token = page.next_page_token

    async def _id(self, run_id: str) -> str:
        """The complete id of a run, because events contain no run names."""
        return (await self.run(run_id)).run.run_id if run_id else ""
