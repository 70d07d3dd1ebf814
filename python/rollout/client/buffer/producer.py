"""Puts groups of samples into the ledger.

A put of some size writes its payloads into the segment that the buffer has lent, where there is one, and hands headers and places
to the sender; a small one hands it everything.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any, Self, cast

import crc32c
import grpc

from rollout.buffer.v1 import buffer_pb2 as pb
from rollout.buffer.v1.buffer_pb2_grpc import BufferServiceStub
from rollout.client.buffer.calls import call
from rollout.client.buffer.pending import Pending, Put
from rollout.client.buffer.sample import Piece, Sample, pieces, told
from rollout.client.buffer.segments import Segments
from rollout.client.buffer.sending import Sender
from rollout.client.buffer.wire import head_of, header_of, key_of, prefix, receipt_of
from rollout.trajectory.v1.trajectory_pb2 import TrajectoryKey
from rollout.weights.v1.weights_pb2 import WeightsReceipt

_INLINE_BYTES = 64 << 10  # of a put that travels: a file of its own costs more than the copies, and a wait for the disk


class Producer:
    """Puts of one run, from any thread. Leaving its ``with`` waits for all of them."""

    def __init__(
        self, channel: grpc.Channel, metadata: tuple[tuple[str, str], ...], run: str, *, in_flight: int, address: str = ""
    ) -> None:
        """in_flight: puts that were sent and are not answered; as many are prepared meanwhile, so that the next request is there
        when the last is answered. address: host:port of a buffer that is reached without TLS and so by a plain socket too.
        Raises ``ValueError`` for an ``in_flight`` below 1."""
        if in_flight < 1:
            raise ValueError(f"in_flight must be at least 1, it is {in_flight}")
        stub = cast(Any, BufferServiceStub(channel))
        self._segments = Segments(lambda: call(stub.LendSegment, pb.LendSegmentRequest(run_id=run), metadata))
        self._run, self._held = run, 2 * in_flight
        self._room: SimpleQueue[None] = SimpleQueue()
        self._flushing = threading.Lock()  # two that each took a part of the room would wait for the other's
        self._closed = False  # written while all of the room is taken
        for _ in range(self._held):
            self._room.put(None)
        self._sender = Sender(channel, metadata, run, self._segments, self._room, in_flight=in_flight, address=address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(
        self,
        index: int,
        samples: Sequence[Sample],
        *,
        epoch: int = 0,
        attempt: int = 0,
        first: int = 0,
        group_size: int = 0,
        receipt: WeightsReceipt | None = None,
    ) -> Put:
        """Put the samples of group ``index`` of an epoch; the arrays may be changed when this returns.

        first: number of the first sample in the group. group_size: samples that make the group complete, without it those given.
        receipt: the weights that the engine held. Waits while as many puts as may be in flight are, and as many are prepared.
        attempt: a sample that is refused, or failed, dissolves its group; the group's samples are wanted again with a higher
        attempt than before, and those of a lower one count as duplicates.
        Raises ``ValueError`` for arrays that don't fit and where it is closed; of a put that does not travel ``RemoteError``
        where the buffer can't be asked for a segment, ``OSError`` for a full disk. What else fails, ``result()`` raises.
        """
        group = TrajectoryKey(run_id=self._run, epoch=epoch, index=index, attempt=attempt).SerializeToString()
        size, tail = group_size or len(samples), receipt_of(receipt)
        heads, payloads, crcs = list[bytes](), list[list[Piece]](), list[int]()
        for number, sample in enumerate(samples, first):
            about = sample.about
            tells = told(about)
            key = key_of(group, number, about.key.part if about.HasField("key") else 0)
            key = prefix(0x0A, len(key)) + key
            payload = pieces(sample, key + tells)
            crc = 0
            for piece in payload:
                crc = crc32c.crc32c(piece, crc)
            heads.append(head_of(key + header_of(about, tells, len(sample.token_ids), size) + tail, crc))
            payloads.append(payload)
            crcs.append(crc)
        self._room.get()
        try:
            if self._closed:
                raise ValueError("the producer is closed")
            pending = self._write(heads, payloads, crcs)
        except BaseException:
            self._room.put(None)
            raise
        self._sender.queue(pending)
        return pending.done

    def flush(self) -> None:
        """Wait until everything that was put is durable, or has failed."""
        self._drain()

    def close(self) -> None:
        """Wait for what was put, and let the segments go. Puts that failed say so where they are asked. Nothing is put any more;
        to close again does nothing."""
        if self._drain(close=True):
            self._sender.close()

    def _drain(self, *, close: bool = False) -> bool:
        """Whether this is the call that closed it."""
        with self._flushing:
            for _ in range(self._held):
                self._room.get()
            closes = close and not self._closed
            self._closed |= close
            for _ in range(self._held):
                self._room.put(None)
        return closes

    def _write(self, heads: list[bytes], payloads: list[list[Piece]], crcs: list[int]) -> Pending:
        pending = Pending.of(heads, [sum(map(len, payload)) for payload in payloads])
        if pending.size <= _INLINE_BYTES or not self._segments.write(pending, payloads, crcs):
            pending.carry(payloads)
        return pending
