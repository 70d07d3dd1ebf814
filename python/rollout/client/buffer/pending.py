"""One put on its way to the buffer."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from rollout.buffer.v1 import buffer_pb2 as pb
from rollout.client.buffer.sample import Piece
from rollout.client.buffer.segment import LentSegment
from rollout.client.buffer.wire import PAYLOAD, PLACE, batch_of
from rollout.trajectory.v1.trajectory_pb2 import PayloadPlace

HEADER = struct.Struct("<II")  # length and CRC-32C before each payload of a file


class Put(Future[pb.PutResult]):
    """``result()`` returns when the samples are durable: how many were accepted, had been there, or were refused and why. It
    can't be cancelled: what is on its way may arrive."""

    def cancel(self) -> bool:
        return False


@dataclass(slots=True, eq=False)
class Pending:
    """heads: its envelopes without payloads and places. batch: its ``TrajectoryBatch``, serialized. lengths: of the payloads.
    segment, begin, size: its records, where they are in a file."""

    heads: list[bytes]
    batch: bytes
    lengths: list[int]
    size: int
    segment: LentSegment | None = None
    begin: int = 0
    done: Put = field(default_factory=Put)

    @classmethod
    def of(cls, heads: list[bytes], lengths: list[int]) -> Pending:
        """A put that has no batch yet."""
        return cls(heads, b"", lengths, sum(lengths) + HEADER.size * len(lengths))

    def carry(self, payloads: Sequence[Sequence[Piece]]) -> None:
        """Let the payloads travel with it."""
        self.batch = batch_of(self.heads, PAYLOAD, [b"".join(payload) for payload in payloads])
        self.segment = None

    def place(self, segment: LentSegment, records: Sequence[Piece]) -> None:
        """Write the records into a file, and let their places travel. Raises ``OSError``; then it is as it was."""
        self.begin = segment.append(records, self.size)
        at, places = self.begin, list[bytes]()
        for length in self.lengths:
            place = PayloadPlace(segment=segment.number, offset=at + HEADER.size, length=length, lending=segment.lending)
            places.append(place.SerializeToString())
            at += HEADER.size + length
        self.batch = batch_of(self.heads, PLACE, places)
        self.segment = segment

    def payloads_of(self, records: bytes) -> list[list[Piece]]:
        """The payloads of records that were written."""
        out, at = list[list[Piece]](), 0
        for length in self.lengths:
            at += HEADER.size
            out.append([records[at : at + length]])
            at += length
        return out

    @property
    def carried(self) -> int:
        """Bytes that travel with the call."""
        return 0 if self.segment else self.size
