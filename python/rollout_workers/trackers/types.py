"""What goes to a sink, and what a sink is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from rollout.errors import RolloutError
from rollout.event.v1.event_pb2 import Event

KINDS = {"completions": "completions", "step.committed": "step", "eval.finished": "eval"}
"""Kind of an event -> kind of its record, in the order in which those of a step come."""
COLUMNS = ("step", "epoch", "index", "sample", "prompt", "completion", "reward", "advantage", "tokens", "truncated")
"""Of the table of completions."""


class LibraryMissing(RolloutError):
    """The tracker's library is not installed."""

    reason: ClassVar[str] = "SINK_LIBRARY_MISSING"


@dataclass(frozen=True, slots=True)
class Facts:
    """The run. directory: its own folder. config: its configuration, with defaults, as plain
    values."""

    run_id: str
    name: str
    directory: str
    base_dir: str
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of a step.

    kind: ``step``, ``eval`` or ``completions``. seconds: since 1970, UTC. metrics: by the field's
    names. rows: completions, one value a column of ``COLUMNS``.
    """

    kind: str
    step: int
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    rows: Sequence[Sequence[Any]] = ()


class Sink(Protocol):
    """One tracker. Belongs to one thread; any method may raise what the tracker's library
    raises."""

    name: str

    def open(self) -> str:
        """Find the run there, or make it, and see what it holds already. Returns where it is, for
        people. May be called again after a failure. Raises ``LibraryMissing``."""
        ...

    def write(self, record: Record) -> bool:
        """Write what is not there yet; False where all of it was. What it wrote survives the death
        of this process."""
        ...

    def close(self, state: str) -> None:
        """Record the run's final state (``SUCCEEDED``, ``FAILED``, ...; "" if it continues) and
        disconnect."""
        ...


def record_of(event: Event) -> Record | None:
    """What an event says to sinks; None where it says nothing."""
    kind = KINDS.get(event.kind)
    if kind is None:
        return None
    seconds = event.time.ToNanoseconds() / 1e9
    if kind != "completions":
        return Record(kind, event.step, seconds, metrics=dict(event.metrics))
    kept = json.loads(event.attributes.get("completions") or "[]")
    return Record(kind, event.step, seconds, rows=[[event.step, *(row.get(name) for name in COLUMNS[1:])] for row in kept])
