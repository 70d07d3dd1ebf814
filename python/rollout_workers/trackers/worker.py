"""The processes that write to a run's trackers: a worker during the run, and the export after
it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from rollout import names
from rollout.config.v1.run_config_pb2 import RunConfig
from rollout.event.v1 import event_pb2 as pb
from rollout.run.v1.run_pb2 import WorkerSpec
from rollout.storage.v1.storage_pb2 import AppendEventsRequest
from rollout.storage.v1.storage_pb2_grpc import EventServiceStub
from rollout_workers.trackers.build import facts_of, sinks_of
from rollout_workers.trackers.feed import Feed
from rollout_workers.trackers.source import from_lines, from_services
from rollout_workers.worker.credential import of_server, own
from rollout_workers.worker.discovery import Services, call
from rollout_workers.worker.events import ulid
from rollout_workers.worker.lifecycle import Lifecycle
from rollout_workers.worker.spec import Identity
from rollout_workers.worker.tls import of_agent, of_mesh

log = logging.getLogger(__name__)

STUCK_SECONDS = 180.0  # creating a new store takes a while
_CLOSE_SECONDS = 8.0
EXIT_DATA = 65


async def run_sinks_worker(spec: WorkerSpec, who: Identity, lifecycle: Lifecycle, stuck_seconds: float = STUCK_SECONDS) -> None:
    """Feed every sink of the plan until the run ends or ``lifecycle`` requests a shutdown."""
    quiet()

    def services() -> Services:
        return Services(
            spec.consul_address,
            own(spec),
            services_key=spec.services_key,
            peer_token=spec.peer_token,
            consul_token=of_server(spec, spec.consul_token),
            agent_files=of_agent(spec),
            tls=of_mesh(spec),
        )

    events = SinkEvents(who, services())
    loop = asyncio.get_running_loop()

    def warn(sink: str, error: str) -> None:
        asyncio.run_coroutine_threadsafe(events.failed(sink, error), loop)

    facts = facts_of(spec.plan.config, spec.run_id, spec.run_directory, spec.base_dir)
    source = from_services(services, spec.run_id, time.time())
    feeds = [Feed(sink, source, warn) for sink in sinks_of(spec.plan.config.sinks, facts)]
    for feed in feeds:
        feed.start()
    leaving = asyncio.create_task(lifecycle.wait())
    reported: set[str] = set()
    while any(feed.thread.is_alive() for feed in feeds) and not lifecycle.leaving:
        await asyncio.wait({leaving}, timeout=0.2)
        for feed in feeds:
            if feed.stuck(stuck_seconds) and feed.name not in reported:
                reported.add(feed.name)
                await events.failed(feed.name, f"a call has not returned for more than {stuck_seconds:g} s")
    leaving.cancel()
    for feed in feeds:
        feed.stop()
    until = time.monotonic() + _CLOSE_SECONDS
    for feed in feeds:
        await asyncio.to_thread(feed.thread.join, max(0.0, until - time.monotonic()))
        await events.finished(feed)
    await events.close()


class SinkEvents:
    """Sends events to the storage service, because this process has no NATS connection."""

    def __init__(self, who: Identity, services: Services) -> None:
        self._who, self._services = who, services

    async def failed(self, sink: str, error: str) -> None:
        """Report a failing sink. Called once per sink."""
        await self.emit(
            "sink.failed",
            f"cannot write to the sink {sink}: {error}. The run continues. Missing records are written when the sink works "
            f"again; to write them later, run `rollout export metrics {self._who.run} --to {sink}`",
            level=pb.LEVEL_WARN,
            attributes={"sink": sink, "error": error},
        )

    async def finished(self, feed: Feed) -> None:
        tally = feed.tally
        await self.emit(
            "sink.finished",
            f"wrote {tally.written} records to the sink {feed.name}; {tally.where}",
            level=pb.LEVEL_INFO,
            attributes={"sink": feed.name, "where": tally.where, "complete": str(tally.done).lower(), "error": tally.error},
            metrics={"written": tally.written, "known": tally.known, "failures": tally.failures},
        )

    async def emit(self, kind: str, message: str, *, level: pb.Level.ValueType, attributes: dict[str, str],
                   metrics: dict[str, float] | None = None) -> None:  # fmt: skip
        """Log the event and append it to the event log. A failed append is only logged."""
        log.log(logging.WARNING if level == pb.LEVEL_WARN else logging.INFO, "%s", message)
        now = time.time_ns()
        event = pb.Event(event_id=ulid(now // 1_000_000), run_id=self._who.run, service=self._who.event_source, level=level,
                         kind=kind, message=message, attributes=attributes, metrics=metrics)  # fmt: skip
        event.time.FromNanoseconds(now)
        try:
            await call(
                self._services,
                names.STORAGE_SERVICE,
                EventServiceStub,
                "AppendEvents",
                AppendEventsRequest(events=[event]),
                tries=3,
            )
        except Exception as error:
            log.info("cannot write to the event log: %s", error)

    async def close(self) -> None:
        await self._services.close()


def export(path: str) -> int:
    """Write the events of a file to sinks. The first line of the file describes the run; each other
    line is an event. Prints one JSON object per sink. Returns the exit code."""
    quiet()
    lines = Path(path).read_text().splitlines()
    head: dict[str, Any] = json.loads(lines[0])
    config = json_format.ParseDict(head["config"], RunConfig(), ignore_unknown_fields=True)
    facts = facts_of(config, head["run_id"], head["directory"], head["base_dir"])
    nothing: Callable[[str, str], None] = lambda sink, error: None  # noqa: E731
    feeds = [Feed(sink, from_lines(lines[1:]), nothing, tries=2) for sink in sinks_of(config.sinks, facts)]
    for feed in feeds:
        feed.start()
    for feed in feeds:
        feed.thread.join()
        print(json.dumps({"sink": feed.name, **dataclasses.asdict(feed.tally)}), flush=True)
    return 0 if all(feed.tally.done for feed in feeds) else EXIT_DATA


def quiet() -> None:
    """Turn off the telemetry of tracker libraries."""
    for name in ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        os.environ.setdefault(name, "true")
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
