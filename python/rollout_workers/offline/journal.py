"""What is done of a batch, durable while it runs: ``OUTPUT.journal``.

The first line holds the inputs that everything depends on; each further line is one row of the
dataset with all its samples, in the order in which they were finished. Lines are only ever
appended. A process that is killed leaves at most half a line at the end, which is cut off when the
journal is opened again.
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
        self._at: dict[int, int] = {}  # row -> where its newest line begins
        self._failed: set[int] = set()
        self._synced = time.monotonic()

    @classmethod
    def open(cls, path: str, inputs: Mapping[str, Any], *, restart: bool) -> Journal:
        """Start a journal, or continue an existing one. restart: discard an existing one.

        Raises :class:`InputsChanged` naming what differs, :class:`JournalBusy`,
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
        """Keep a row; what was kept of it before counts no more. It outlives a kill at once and a
        power cut a second later. Raises :class:`CannotWrite`."""
        try:
            self._at[row] = self._file.seek(0, os.SEEK_END)
            self._file.write(_line({"row": row, "samples": samples}))
            self._file.flush()
            if time.monotonic() - self._synced >= _SYNC_SECONDS:
                self.sync()
        except OSError as error:
            raise CannotWrite(
                f"can't write {self.path}: {error.strerror}", fix="make space and run the same command again"
            ) from error
        self._failed.discard(row)
        if _has_failed(samples):
            self._failed.add(row)

    def sync(self) -> None:
        """Make durable what was appended."""
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def samples(self, row: int) -> list[dict[str, Any]]:
        """What was kept of a row. Raises ``KeyError``."""
        self._file.seek(self._at[row])
        return json.loads(self._file.readline())["samples"]

    def close(self) -> None:
        """Release it; idempotent. One without a row is deleted."""
        if not self._file.closed and not self._at:
            with suppress(FileNotFoundError):
                os.unlink(self.path)
        self._file.close()

    def remove(self) -> None:
        """Delete it: the output has everything."""
        self._at.clear()
        self.close()

    def _begin(self, inputs: dict[str, Any]) -> None:
        head = self._file.readline()
        if not head.endswith(b"\n"):  # new, or its first line never got there
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
            raise JournalDamaged(f"{self.path} is no journal of this version", fix="begin anew with --restart, or remove it")
        changes = differences(known, inputs)
        if changes and os.fstat(self._file.fileno()).st_size == len(head):  # nothing was done with those
            self._file.truncate(0)
            self._file.seek(0)
            self._begin(inputs)
            return
        if changes:
            raise InputsChanged(
                f"{self.path} was begun with other inputs: {'; '.join(changes)}",
                fix="give it the same inputs, name another output, or begin anew with --restart",
            )
        for start, row, failed in self._lines(len(head)):
            self._at[row] = start
            (self._failed.add if failed else self._failed.discard)(row)

    def _lines(self, start: int) -> Iterator[tuple[int, int, bool]]:
        """(offset, row, whether a sample failed) of each line; half a line at the end is cut
        off."""
        size = os.fstat(self._file.fileno()).st_size
        while line := self._file.readline():
            end = start + len(line)
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("it has no end")
                kept = json.loads(line)
                yield start, int(kept["row"]), _has_failed(kept["samples"])
            except (ValueError, KeyError, TypeError) as error:
                if end < size:
                    raise JournalDamaged(
                        f"{self.path} is damaged at byte {start}: {error}", fix="begin anew with --restart"
                    ) from error
                self._file.truncate(start)
                return
            start = end


def differences(known: Mapping[str, Any], now: Mapping[str, Any], at: str = "") -> list[str]:
    """What differs between two nested mappings, in words, at most eight of them."""
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
