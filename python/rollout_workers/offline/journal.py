"""The durable progress of a batch: ``OUTPUT.journal``.

The first line has the inputs (see ``inputs``). Each further line is one row of the dataset with all
its samples, in the order in which rows finished. Lines are only appended. A killed process leaves
at most one partial line at the end, which is truncated when the journal is opened again.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rollout_workers.offline.errors import CannotWrite, InputsChanged, JournalBusy, JournalDamaged

FORMAT = 1
_SYNC_SECONDS = 1.0
_MOST_NAMED = 8


class Journal:
    """An open journal, locked against other processes. ``done``: rows that need not be sampled
    again."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._file = os.fdopen(descriptor, "r+b")
        self._at: dict[int, int] = {}  # row -> offset of its newest line
        self._failed: set[int] = set()
        self._synced = time.monotonic()

    @classmethod
    def open(cls, path: str, inputs: Mapping[str, Any], *, restart: bool) -> Journal:
        """Start a journal, or continue an existing one. restart: discard an existing one.

        Raises :class:`InputsChanged`, which names the differences, :class:`JournalBusy`,
        :class:`JournalDamaged`, :class:`CannotWrite`.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise CannotWrite(f"can't write {path}: {error.strerror}", fix="name another output with --output") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise JournalBusy(f"another process writes {path}", fix="wait for it, or name another output") from None
        self = cls(path, descriptor)
        try:
            if restart:
                self._file.truncate(0)
            self._begin(json.loads(json.dumps(inputs)))
        except BaseException:
            self._file.close()
            raise
        return self

    @property
    def done(self) -> set[int]:
        """Rows that have all their samples, none of them INFRA_FAILED."""
        return self._at.keys() - self._failed

    def append(self, row: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Store a row, replacing any earlier line of the row. The row survives a kill of the
        process at once and a power failure after one second. Raises :class:`CannotWrite`."""
        try:
            self._at[row] = self._file.seek(0, os.SEEK_END)
            self._file.write(_line({"row": row, "samples": samples}))
            self._file.flush()
            if time.monotonic() - self._synced >= _SYNC_SECONDS:
                self.sync()
        except OSError as error:
            raise CannotWrite(
                f"can't write {self.path}: {error.strerror}", fix="free disk space and run the same command again"
            ) from error
        self._failed.discard(row)
        if _has_failed(samples):
            self._failed.add(row)

    def sync(self) -> None:
        """Flush appended lines to the disk."""
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def samples(self, row: int) -> list[dict[str, Any]]:
        """The stored samples of a row. Raises ``KeyError``."""
        self._file.seek(self._at[row])
        return json.loads(self._file.readline())["samples"]

    def close(self) -> None:
        """Unlock and close the journal; idempotent. A journal without rows is deleted."""
        if not self._file.closed and not self._at:
            with suppress(FileNotFoundError):
                os.unlink(self.path)
        self._file.close()

    def remove(self) -> None:
        """Delete the journal, once the output is complete."""
        self._at.clear()
        self.close()

    def _begin(self, inputs: dict[str, Any]) -> None:
        head = self._file.readline()
        if not head.endswith(b"\n"):  # new, or its first line is incomplete
            self._file.seek(0)
            self._file.truncate()
            self._file.write(_line({"rollout_batch": FORMAT, "inputs": inputs}))
            self._file.flush()
            self.sync()
            return
        try:
            written = json.loads(head)
            known = written["inputs"] if written["rollout_batch"] == FORMAT else None
        except (ValueError, KeyError, TypeError):
            known = None
        if known is None:
            raise JournalDamaged(f"{self.path} is not a journal of this version", fix="remove it or pass --restart")
        changes = differences(known, inputs)
        if changes and os.fstat(self._file.fileno()).st_size == len(head):  # no rows were stored with those inputs
            self._file.truncate(0)
            self._file.seek(0)
            self._begin(inputs)
            return
        if changes:
            raise InputsChanged(
                f"{self.path} was started with other inputs: {'; '.join(changes)}",
                fix="use the same inputs, name another output, or start again with --restart",
            )
        for start, row, failed in self._lines(len(head)):
            self._at[row] = start
            (self._failed.add if failed else self._failed.discard)(row)

    def _lines(self, start: int) -> Iterator[tuple[int, int, bool]]:
        """(offset, row, whether a sample failed) of each line. A partial last line is truncated."""
        size = os.fstat(self._file.fileno()).st_size
        while line := self._file.readline():
            end = start + len(line)
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("the line has no newline at its end")
                kept = json.loads(line)
                yield start, int(kept["row"]), _has_failed(kept["samples"])
            except (ValueError, KeyError, TypeError) as error:
                if end < size:
                    raise JournalDamaged(
                        f"{self.path} is damaged at byte {start}: {error}", fix="start again with --restart"
                    ) from error
                self._file.truncate(start)
                return
            start = end


def differences(known: Mapping[str, Any], now: Mapping[str, Any], at: str = "") -> list[str]:
    """Describes the differences between two nested mappings, at most eight."""
    found: list[str] = []
    for key in sorted({*known, *now}):
        name, before, after = f"{at}{key}", known.get(key), now.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found += differences(before, after, f"{name}.")
        elif before != after:
            found.append(f"`{name}` was {_shown(before)}, is {_shown(after)}")
    return found[:_MOST_NAMED]


def _shown(value: Any) -> str:
    if value is None:
        return "not there"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _has_failed(samples: Sequence[Mapping[str, Any]]) -> bool:
    return any(sample["status"] == "INFRA_FAILED" for sample in samples)
