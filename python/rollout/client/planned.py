"""Plans, and the requests that both clients make."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from rollout.client.errors import PlanRefused, RemoteError
from rollout.event.v1.event_pb2 import LEVEL_UNSPECIFIED, Level
from rollout.plan.v1 import plan_pb2
from rollout.run.v1 import run_pb2
from rollout.storage.v1 import storage_pb2

ENDED = frozenset(
    {
        run_pb2.RUN_STATE_SUCCEEDED,
        run_pb2.RUN_STATE_FAILED,
        run_pb2.RUN_STATE_CANCELLED,
        run_pb2.RUN_STATE_INTERRUPTED,
    }
)
"""States in which a run makes no progress by itself."""

REFUSED = frozenset({"NON_FINITE_GRADIENT", "EXPLODING_GRADIENT"})
"""Reasons of a pause that lasts until a user resumes or cancels the run."""


def over(run: run_pb2.Run) -> bool:
    """Whether a run makes no more progress by itself: it has ended, or a refused gradient paused
    it."""
    return run.state in ENDED or (run.state == run_pb2.RUN_STATE_PAUSED and run.reason in REFUSED)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan. lock: contents of ``plan.lock``. base_dir: absolute folder to which its paths are
    relative."""

    plan: plan_pb2.Plan
    lock: bytes
    base_dir: str


def plan_request(config: str | os.PathLike[str], overrides: Sequence[str]) -> plan_pb2.CreatePlanRequest:
    """The request for the plan of a TOML file. Raises ``OSError``."""
    path = Path(config).resolve()
    source = plan_pb2.ConfigSource(toml=path.read_bytes(), file=str(config), base_dir=str(path.parent), set=list(overrides))
    return plan_pb2.CreatePlanRequest(source=source)


def planned(request: plan_pb2.CreatePlanRequest, answer: plan_pb2.CreatePlanResponse) -> Planned:
    """The plan in an answer. Raises :class:`PlanRefused`."""
    if answer.problems:
        raise PlanRefused(answer.problems)
    return Planned(answer.plan, answer.lock, request.source.base_dir)


def create_request(plan: Planned, idempotency_key: str, from_snapshot: str) -> run_pb2.CreateRunRequest:
    return run_pb2.CreateRunRequest(
        lock=plan.lock, base_dir=plan.base_dir, idempotency_key=idempotency_key, from_snapshot=from_snapshot
    )


def event_filter(
    run_id: str,
    kinds: Sequence[str] = (),
    services: Sequence[str] = (),
    min_level: Level.ValueType = LEVEL_UNSPECIFIED,
    since: datetime.datetime | None = None,
    after_sequence: int = 0,
) -> storage_pb2.EventFilter:
    made = storage_pb2.EventFilter(
        run_id=run_id, kinds=list(kinds), services=list(services), min_level=min_level, after_sequence=after_sequence
    )
    if since is not None:
        made.since.FromDatetime(since.astimezone(datetime.UTC).replace(tzinfo=None))
    return made


def add_points(found: dict[str, list[tuple[int, float]]], page: storage_pb2.QueryMetricsResponse) -> None:
    """Add the (step, value) pairs of a page of metrics, by name."""
    for series in page.series:
        found.setdefault(series.name, []).extend((point.step, point.value) for point in series.points)


class Outage:
    """Says whether a stream that broke is opened again: while the server is unavailable for less
    than ``OUTAGE_SECONDS``."""

    def __init__(self) -> None:
        self._since: float | None = None

    def over(self) -> None:
        """The server has answered."""
        self._since = None

    def pause(self, error: RemoteError | None) -> float:
        """Seconds until the stream is opened again. error: why it broke; None: the server ended it.
        Raises the error if the server refused the stream, or is unavailable for too long."""
        now = time.monotonic()
        self._since = self._since or now
        if error is not None and error.code is not grpc.StatusCode.UNAVAILABLE:
            raise error
        if now - self._since > OUTAGE_SECONDS:
            raise error or RemoteError("the server ends the stream at once", code=grpc.StatusCode.UNAVAILABLE)
        return 0.5


OUTAGE_SECONDS = 30.0
"""A replica takes over within this time."""
