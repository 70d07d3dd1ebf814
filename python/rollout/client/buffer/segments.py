"""The files that the buffer has lent to one producer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from rollout.buffer.v1 import buffer_pb2 as pb
from rollout.client.buffer.pending import HEADER, Pending
from rollout.client.buffer.sample import Piece
from rollout.client.buffer.segment import LentSegment
from rollout.client.errors import RemoteError


class Segments:
    """At most one is written to; older ones wait for the answers to the puts that name them, and then go back. Any thread."""

    def __init__(self, lend: Callable[[], pb.LendSegmentResponse]) -> None:
        """lend: asks the buffer for another file."""
        self._lend = lend
        self._appending = threading.Lock()  # held while the buffer is asked for another file, too
        self._counting = threading.Lock()  # of _old, and of the unanswered puts of all
        self._writing: LentSegment | None = None
        self._old: list[LentSegment] = []
        self._local = True  # whether the buffer's files may be had here, as far as is known

    def write(self, pending: Pending, payloads: Sequence[Sequence[Piece]], crcs: Sequence[int]) -> bool:
        """Write a put's records; False where there is no file for them. Raises ``OSError``, ``RemoteError``."""
        records = list[Piece]()
        for length, crc, payload in zip(pending.lengths, crcs, payloads, strict=True):
            records.append(HEADER.pack(length, crc))
            records += payload
        with self._appending:
            segment = self._current()
            if segment is None:
                return False
            try:
                self._place(pending, segment, records)
            except OSError:
                self._retire(segment)
                raise
            return True

    def rewrite(self, held: Sequence[Pending]) -> None:
        """The buffer began anew and does not know the files: write the records of puts again, into one that it lends now."""
        with self._appending:
            if self._writing is not None and any(pending.segment is self._writing for pending in held):
                self._retire(self._writing)
            for pending in held:
                old = pending.segment
                if old is None:
                    continue
                records = old.read(pending.begin, pending.size)
                segment = self._current()
                if segment is None:
                    pending.carry(pending.payloads_of(records))
                else:
                    self._place(pending, segment, [records])
                with self._counting:
                    old.unanswered -= 1

    def answered(self, held: Sequence[Pending]) -> None:
        """Nobody waits for these puts any more."""
        with self._counting:
            for pending in held:
                if pending.segment is not None:
                    pending.segment.unanswered -= 1

    def returned(self) -> list[int]:
        """Close the files that are done with; their lendings, for the buffer to know."""
        with self._counting:
            finished = [segment for segment in self._old if not segment.unanswered]
            self._old = [segment for segment in self._old if segment.unanswered]
        for segment in finished:
            segment.close()
        return [segment.lending for segment in finished]

    def close(self) -> bool:
        """Write to none any more; whether there are any to give back."""
        with self._appending:
            if self._writing is not None:
                self._retire(self._writing)
            self._local = False
            return bool(self._old)

    def _current(self) -> LentSegment | None:
        """The one to append to; None where payloads travel with their puts. Under ``_appending``, as the next two."""
        if self._writing is not None and self._writing.full:
            self._retire(self._writing)
        if self._writing is None and self._local:
            try:
                lent = self._lend()
            except RemoteError as error:
                if error.reason != "SEGMENTS_NOT_LENT":
                    raise
                self._local = False
                return None
            self._writing = LentSegment.open(lent)
            self._local = self._writing is not None
        return self._writing

    def _retire(self, segment: LentSegment) -> None:
        if self._writing is segment:
            self._writing = None
        with self._counting:
            self._old.append(segment)

    def _place(self, pending: Pending, segment: LentSegment, records: Sequence[Piece]) -> None:
        pending.place(segment, records)
        with self._counting:
            segment.unanswered += 1
