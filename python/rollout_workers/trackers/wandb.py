"""Writes a run to Weights & Biases with the wandb package.

The W&B run has the ID of our run, so a resumed run continues it. W&B numbers rows with a counter
that only grows. Each step has three fixed row numbers, one per kind of record, so rows that an
earlier process stored can be skipped. Charts use ``step`` as their x axis.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollout_workers.trackers.types import COLUMNS, Facts, LibraryMissing, Record

_PLACES = ("completions", "step", "eval")
_BLOCK = 32768


class Wandb:
    """Writes metrics under their names, and the table ``completions``."""

    name = "wandb"

    def __init__(self, facts: Facts, folder: Path, *, project: str, entity: str, mode: str) -> None:
        """folder: parent of the folder ``wandb`` that the package creates. mode: ``offline`` or
        ``online``."""
        self._facts, self._folder = facts, folder
        self._project, self._entity, self._mode = project, entity, mode
        self._run: Any = None
        self._last = -1  # newest written row number
        self._stored = -1  # the same when this process began
        self._evals: set[int] = set()  # places of the evaluations that this process wrote

    def open(self) -> str:
        try:
            import wandb
        except ImportError as error:
            fix = "install `rollout-workers[wandb]` into the workers' environment"
            raise LibraryMissing(f"the package wandb can't be imported: {error}", fix=fix) from error
        self._folder.mkdir(parents=True, exist_ok=True)
        self.close("")
        self._last = self._stored = self._written()
        self._run = wandb.init(
            project=self._project,
            entity=self._entity or None,
            id=self._facts.run_id,
            name=self._facts.name,
            dir=str(self._folder),
            mode=self._mode,  # pyright: ignore[reportArgumentType]
            resume="allow" if self._mode == "online" else None,
            config=dict(self._facts.config),
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, disable_code=True, disable_job_creation=True, x_disable_stats=True
            ),
        )
        self._run.define_metric("*", step_metric="step")
        if self._mode == "online":
            self._last = self._stored = max(self._last, self._run.step - 1)
            return str(self._run.url)
        return f"{self._run.settings.sync_dir}; upload it with `wandb sync`"

    def write(self, record: Record) -> bool:
        import wandb

        place = len(_PLACES) * record.step + _PLACES.index(record.kind)
        if place <= self._last:
            if record.kind != "eval" or place <= self._stored or place in self._evals:
                return False
            self._evals.add(place)
            place = self._last + 1  # an evaluation of reserved workers ends after later steps
        elif record.kind == "eval":
            self._evals.add(place)
        row: dict[str, Any] = {"step": record.step, **record.metrics}
        if record.kind == "completions":
            row["completions"] = wandb.Table(columns=list(COLUMNS), data=[list(values) for values in record.rows])
        self._run.log(row, step=place, commit=True)
        self._last = place
        return True

    def close(self, state: str) -> None:
        if self._run is not None:
            import wandb

            self._run.finish(exit_code=1 if state == "FAILED" else 0)
            wandb.teardown()  # flushes and ends the process of wandb
            self._run = None

    def _written(self) -> int:
        """The newest row number in the files of this run; -1 without files. Includes files that
        earlier processes wrote."""
        found = -1
        run = self._facts.run_id
        for path in self._folder.glob(f"wandb/*run-*-{run}*/run-{run}.wandb"):  # W&B adds a number if two start in one second
            for row in history(path):
                found = max(found, int(row.get("_step", -1)))
        return found


def history(path: Path) -> Iterator[dict[str, Any]]:
    """The complete rows of a ``.wandb`` file: W&B records in a LevelDB log with blocks of 32
    KiB."""
    from wandb.proto.wandb_internal_pb2 import Record as WandbRecord  # pyright: ignore[reportAttributeAccessIssue]

    for body in _bodies(path.read_bytes()):
        record = WandbRecord.FromString(body)
        if record.WhichOneof("record_type") == "history":
            yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def _bodies(data: bytes) -> Iterator[bytes]:
    at, parts = 7, b""  # after the header of the file
    while at + 7 <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < 7:  # too short for a header: padding
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        body = data[at + 7 : at + 7 + length]
        if len(body) < length or kind not in (1, 2, 3, 4):
            return
        at += 7 + length
        parts = body if kind in (1, 2) else parts + body  # whole, first | middle, last
        if kind in (1, 4):
            yield parts
