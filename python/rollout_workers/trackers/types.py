"""The sink protocol and the records that sinks receive."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from rollout.errors import RolloutError
from rollout.event.v1.event_pb2 import Event

KINDS = {"completions": "completions", "step.committed": "step", "eval.finished": "eval"}
"""Kind of an event -> kind of its record, in the order of a step's records."""
COLUMNS = ("step", "epoch", "index", "sample", "prompt", "completion", "reward", "advantage", "tokens", "truncated")
"""Columns of the table of completions."""


class LibraryMissing(RolloutError):
    """The tracker's library is not installed."""

    reason: ClassVar[str] = "SINK_LIBRARY_MISSING"


@dataclass(frozen=True, slots=True)
class Facts:
    """Describes the run. directory: the run's folder. config: the configuration, including
    defaults, as plain values."""

    run_id: str
    name: str
    directory: str
    base_dir: str
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Record:
    """Data of one step for a tracker.

    kind: ``step``, ``eval``, or ``completions``. seconds: since 1970, UTC. metrics: by name. rows:
    completions, with one value per column of ``COLUMNS``.
    """

    kind: str
    step: int
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    rows: Sequence[Sequence[Any]] = ()


class Sink(Protocol):
    """A connection to one tracker, used by one thread. Any method may raise an exception of the
    tracker's library."""

    name: str

    def open(self) -> str:
        """Find or create the run in the tracker, and read which steps are stored. Returns a
        human-readable location. May be called again after a failure. Raises ``LibraryMissing``."""
        ...

    def write(self, record: Record) -> bool:
        """Write the parts of the record that the tracker does not have. Returns False if it has all
        of them. Written data survives a kill of this process."""
        ...

    def close(self, state: str) -> None:
        """Record the run's final state (``SUCCEEDED``, ``FAILED``, ...; "" if it continues) and
        disconnect."""
        ...


def record_of(event: Event) -> Record | None:
    """The record of an event; None if the event is not for trackers."""
    kind = KINDS.get(event.kind)
    if kind is None:
        return None
    seconds = event.time.ToNanoseconds() / 1e9
    if kind != "completions":
        return Record(kind, event.step, seconds, metrics=dict(event.metrics))
    kept = json.loads(event.attributes.get("completions") or "[]")
    return Record(kind, event.step, seconds, rows=[[event.step, *(row.get(name) for name in COLUMNS[1:])] for row in kept])
