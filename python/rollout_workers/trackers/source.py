"""Reads the events of a run from the event log of the control plane or from a file."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import grpc
from google.protobuf import json_format

from rollout import names
from rollout.event.v1.event_pb2 import Event
from rollout.storage.v1.storage_pb2 import EventFilter, TailEventsRequest, TailEventsResponse
from rollout.storage.v1.storage_pb2_grpc import EventServiceStub
from rollout_workers.trackers.types import KINDS
from rollout_workers.worker.discovery import Services, ServiceUnavailable

log = logging.getLogger(__name__)

Source = Callable[[], AsyncIterator[Event]]
"""Each call returns the events for a tracker and the ``run.state`` events, starting at the first
event."""
ENDED = ("SUCCEEDED", "FAILED", "CANCELLED", "INTERRUPTED")
_WANTED = (*KINDS, "run.state")
_LATE_SECONDS = 2.0  # events of the last step can arrive after the run's final state
_PAUSE_SECONDS = 1.0


def from_services(make: Callable[[], Services], run_id: str, since: float) -> Source:
    """Follow the event log until the run ends; reconnects if the control plane is unavailable.
    since: Unix time in seconds; final states before it are ignored, because the run was resumed."""

    async def events() -> AsyncIterator[Event]:
        services, after = make(), 0
        try:
            while True:
                try:
                    stub = await services.stub(names.STORAGE_SERVICE, EventServiceStub)
                    wanted = EventFilter(run_id=run_id, kinds=_WANTED, after_sequence=after)
                    stream = stub.TailEvents(TailEventsRequest(filter=wanted), metadata=services.metadata())
                    async for event in _until_the_end(stream, since):
                        after = event.sequence
                        yield event
                    return
                except (ServiceUnavailable, grpc.aio.AioRpcError) as error:
                    log.info("cannot follow the event log, retrying: %s", error)
                    services.forget(names.STORAGE_SERVICE)
                    await asyncio.sleep(_PAUSE_SECONDS)
        finally:
            await services.close()

    return events


async def _until_the_end(stream: grpc.aio.UnaryStreamCall, since: float) -> AsyncIterator[Event]:
    ended = False
    while True:
        try:
            async with asyncio.timeout(_LATE_SECONDS if ended else None):
                response = await stream.read()
        except TimeoutError:
            stream.cancel()
            return
        if not isinstance(response, TailEventsResponse):
            raise ServiceUnavailable("the event log ended its stream")
        for event in response.events:
            yield event
            ended = ended or (
                event.kind == "run.state" and event.attributes["state"] in ENDED and event.time.ToNanoseconds() / 1e9 >= since
            )


def from_lines(lines: Sequence[str] | Path) -> Source:
    """Read events from a file or a list, one JSON object per line. Raises ``OSError``,
    ``json_format.ParseError``."""

    async def events() -> AsyncIterator[Event]:
        given = lines.read_text().splitlines() if isinstance(lines, Path) else lines
        for line in given:
            yield json_format.Parse(line, Event())

    return events
