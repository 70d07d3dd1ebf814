"""Puts groups of samples into the ledger.

A put of some size writes its payloads into the segment that the buffer has lent, where there is one, and hands headers and places
to the sender; a small one hands it everything. The sender keeps a stream open. Puts that come while a request is under way travel
together with the next one, so small ones share messages and syncs.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Self, cast

import crc32c
import grpc
from google.protobuf.message import DecodeError

from rollout.buffer.v1 import buffer_pb2 as pb
from rollout.buffer.v1.buffer_pb2_grpc import BufferServiceStub
from rollout.client.buffer.calls import call
from rollout.client.buffer.direct import Direct
from rollout.client.buffer.sample import Piece, Sample, pieces, told
from rollout.client.buffer.segment import LentSegment
from rollout.client.buffer.wire import PAYLOAD, PLACE, batch_of, head_of, header_of, key_of, prefix, receipt_of, request_of
from rollout.client.errors import RemoteError
from rollout.trajectory.v1.trajectory_pb2 import PayloadPlace, TrajectoryKey
from rollout.weights.v1.weights_pb2 import WeightsReceipt

_HEADER = struct.Struct("<II")  # length and CRC-32C before each payload
_REQUESTS = 2  # unanswered ones of a stream: one is on its way while another is made durable
_MOST_PUTS = 256  # of one request
_MOST_BYTES = 32 << 20  # of inline payloads of one request
_SMALL_BYTES = 256 << 10  # of payloads up to which a request waits for more puts
_INLINE_BYTES = 64 << 10  # of a put that travels: a file of its own costs more than the copies, and a wait for the disk
_WAIT_SECONDS = 0.001
_WAKE = object()
_SERVICE = f"/{pb.DESCRIPTOR.services_by_name['BufferService'].full_name}/"  # whose requests are made of bytes


class Put(Future[pb.PutResult]):
    """``result()`` returns when the samples are durable: how many were accepted, had been there, or were refused and why. It
    can't be cancelled: what is on its way may arrive."""

    def cancel(self) -> bool:
        return False


@dataclass(slots=True, eq=False)
class _Pending:
    """A put on its way. heads: its envelopes without payloads and places. batch: its ``TrajectoryBatch``, serialized. segment,
    begin, size: its records, where they are in a file. lengths: of the payloads."""

    heads: list[bytes]
    batch: bytes
    segment: LentSegment | None
    begin: int
    size: int
    lengths: list[int]
    done: Put = field(default_factory=Put)

    @property
    def carried(self) -> int:
        """Bytes that travel with the call."""
        return 0 if self.segment else self.size


class _Stream:
    """Puts that went into one stream and are not answered yet, oldest first."""

    def __init__(self, first: list[_Pending]) -> None:
        self.unanswered, self.ended = deque([first]), False
        self._lock = threading.Lock()
        self._room = threading.Semaphore(_REQUESTS - 1)

    def room(self) -> bool:
        """Wait until another request may be sent; False where the stream has ended."""
        self._room.acquire()
        return not self.ended

    def add(self, held: list[_Pending]) -> bool:
        with self._lock:
            if not self.ended:
                self.unanswered.append(held)
            return not self.ended

    def answered(self) -> list[_Pending]:
        with self._lock:
            held = self.unanswered.popleft()
        self._room.release()
        return held

    def end(self) -> list[list[_Pending]]:
        """Nothing is added any more; what was not answered."""
        with self._lock:
            self.ended = True
        self._room.release()
        return list(self.unanswered)


class Producer:
    """Puts of one run, from any thread. Leaving its ``with`` waits for all of them."""

    def __init__(
        self, channel: grpc.Channel, metadata: tuple[tuple[str, str], ...], run: str, *, in_flight: int, address: str = ""
    ) -> None:
        """address: host:port of a buffer that is reached without TLS and so by a plain socket too."""
        self._stub = cast(Any, BufferServiceStub(channel))
        bare = cast(Any, channel)
        self._put = bare.unary_unary(_SERVICE + "PutTrajectories", None, pb.PutTrajectoriesResponse.FromString)
        self._stream = bare.stream_stream(_SERVICE + "StreamTrajectories", None, pb.StreamTrajectoriesResponse.FromString)
        self._metadata, self._run, self._address = metadata, run, address
        self._head = pb.PutTrajectoriesRequest(run_id=run).SerializeToString()
        self._room: SimpleQueue[None] = SimpleQueue()
        for _ in range(in_flight):
            self._room.put(None)
        self._in_flight = in_flight
        self._queue: SimpleQueue[Any] = SimpleQueue()  # of _Pending, _WAKE, and None at the end
        self._writing = threading.Lock()  # of the segment and of which is lent
        self._gathering = threading.Lock()  # one thread at a time
        self._counting = threading.Lock()  # of _calling
        self._calling = 0  # puts that are in requests
        self._segment: LentSegment | None = None
        self._old: list[LentSegment] = []
        self._local = True
        self._ended = False  # the end was taken from the queue
        self._sender = threading.Thread(target=self._send, name="put", daemon=True)
        self._sender.start()

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
        receipt: the weights that the engine held. Waits while as many puts as may be in flight are. Raises ``ValueError`` for
        arrays that don't fit; of a put that does not travel ``RemoteError`` where the buffer can't be asked for a segment,
        ``OSError`` for a full disk. What else fails, the put's ``result()`` raises.
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
            pending = self._write(heads, payloads, crcs)
        except BaseException:
            self._room.put(None)
            raise
        self._queue.put(pending)
        return pending.done

    def flush(self) -> None:
        """Wait until everything that was put is durable, or has failed."""
        for _ in range(self._in_flight):
            self._room.get()
        for _ in range(self._in_flight):
            self._room.put(None)

    def close(self) -> None:
        """Wait for what was put, and let the segments go. Puts that failed say so where they are asked."""
        self.flush()
        self._queue.put(None)
        self._sender.join()
        with self._writing:
            if self._segment is not None:
                self._retire(self._segment)
            self._local = False
        if self._old:
            with contextlib.suppress(RemoteError):  # else they are idle soon
                self._call([])

    def _write(self, heads: list[bytes], payloads: list[list[Piece]], crcs: list[int]) -> _Pending:
        lengths = [sum(map(len, payload)) for payload in payloads]
        size, begin = sum(lengths) + _HEADER.size * len(lengths), 0
        if size <= _INLINE_BYTES:
            return _Pending(heads, _carry(heads, payloads), None, begin, size, lengths)
        records = list[Piece]()
        for length, crc, payload in zip(lengths, crcs, payloads, strict=True):
            records.append(_HEADER.pack(length, crc))
            records += payload
        with self._writing:
            segment = self._current()
            if segment is not None:
                try:
                    begin = segment.append(records, size)
                except OSError:
                    self._retire(segment)
                    raise
                segment.unanswered += 1
        if segment is None:
            return _Pending(heads, _carry(heads, payloads), None, begin, size, lengths)
        return _Pending(heads, _name(heads, segment, begin, lengths), segment, begin, size, lengths)

    def _current(self) -> LentSegment | None:
        """The segment to append to; None where payloads travel inline. Under the lock."""
        if self._segment is not None and self._segment.full:
            self._retire(self._segment)
        if self._segment is None and self._local:
            request = pb.LendSegmentRequest(run_id=self._run)
            try:
                lent = call(self._stub.LendSegment, request, self._metadata)
            except RemoteError as error:
                if error.reason != "SEGMENTS_NOT_LENT":
                    raise
                self._local = False
                return None
            self._segment = LentSegment.open(lent)
            self._local = self._segment is not None
        return self._segment

    def _retire(self, segment: LentSegment) -> None:
        if self._segment is segment:
            self._segment = None
            self._old.append(segment)

    def _send(self) -> None:
        """Put what is queued, stream after stream, until the end. Runs in the sender."""
        while not self._ended and (held := self._gather(None)):
            self._follow(_Stream(held))

    def _follow(self, stream: _Stream) -> None:
        """Put through one stream until it ends. What it leaves unanswered is put by calls, which say why where that fails too."""
        answered = False
        try:
            for answer in self._exchange(stream):
                self._settle(stream.answered(), answer.answer.results)
                answered = True
        except (grpc.RpcError, OSError, DecodeError):
            pass  # a call tells
        if not answered:
            self._address = ""  # whatever stands between does not like it
        left = stream.end()
        self._queue.put(_WAKE)  # who gathers for it
        for held in left:
            try:
                results = self._call(held)
            except BaseException as error:
                self._settle(held, error)
            else:
                self._settle(held, results)

    def _exchange(self, stream: _Stream) -> Iterator[pb.StreamTrajectoriesResponse]:
        """The answers to the requests of a stream."""
        if self._address:
            with contextlib.suppress(OSError, ValueError):
                direct = Direct(self._address, _SERVICE + "StreamTrajectories", self._metadata)
                return map(pb.StreamTrajectoriesResponse.FromString, direct.exchange(self._requests(stream)))
        return self._stream(self._requests(stream), metadata=self._metadata)

    def _requests(self, stream: _Stream) -> Iterator[bytes]:
        """The requests of a stream. Runs in a thread of its transport's, which takes one when it can send it."""
        yield _streamed(self._request(stream.unanswered[0]))
        while stream.room():
            held = self._gather(stream)
            if not held:
                return
            if not stream.add(held):  # it ended meanwhile
                with self._counting:
                    self._calling -= len(held)
                for pending in held:
                    self._queue.put(pending)
                return
            yield _streamed(self._request(held))

    def _gather(self, stream: _Stream | None) -> list[_Pending]:
        """The next puts of one request; nothing at the end, or where the stream has ended. Small ones wait a moment for company,
        unless all that may be in flight are here."""
        with self._gathering:
            first = self._queue.get()
            while first is _WAKE:
                if stream is not None and stream.ended:
                    return []
                first = self._queue.get()
            if first is None:
                self._ended = True
                return []
            held, size, carried = [first], first.size, first.carried
            while len(held) < _MOST_PUTS and carried < _MOST_BYTES:
                wait = size < _SMALL_BYTES and len(held) + self._calling < self._in_flight
                try:
                    pending = self._queue.get(wait, _WAIT_SECONDS) if wait else self._queue.get_nowait()
                except Empty:
                    break
                if pending is _WAKE:
                    continue
                if pending is None:
                    self._queue.put(None)  # the end, once this is sent
                    break
                held.append(pending)
                size += pending.size
                carried += pending.carried
            with self._counting:
                self._calling += len(held)
            return held

    def _request(self, held: Sequence[_Pending]) -> list[bytes]:
        """A ``PutTrajectoriesRequest`` in pieces."""
        with self._writing:
            finished = [segment for segment in self._old if not segment.unanswered]
            self._old = [segment for segment in self._old if segment.unanswered]
        for segment in finished:
            segment.close()
        rest = (
            pb.PutTrajectoriesRequest(returned=[segment.lending for segment in finished]).SerializeToString() if finished else b""
        )
        return request_of(self._head, (pending.batch for pending in held), rest)

    def _call(self, held: Sequence[_Pending]) -> Sequence[pb.PutResult]:
        while True:
            try:
                return call(self._put, b"".join(self._request(held)), self._metadata).results
            except RemoteError as error:
                if error.reason != "SEGMENT_NOT_LENT":
                    raise
            self._rewrite(held)

    def _rewrite(self, held: Sequence[_Pending]) -> None:
        """The buffer began anew and does not know the segments: write the records again, into one that it lends now."""
        with self._writing:
            if self._segment is not None and any(pending.segment is self._segment for pending in held):
                self._retire(self._segment)
            for pending in held:
                old = pending.segment
                if old is None:
                    continue
                data = old.read(pending.begin, pending.size)
                new = self._current()
                if new is None:
                    pending.batch = _carry(pending.heads, _split(data, pending.lengths))
                else:
                    pending.begin = new.append([data], pending.size)
                    new.unanswered += 1
                    pending.batch = _name(pending.heads, new, pending.begin, pending.lengths)
                old.unanswered -= 1  # together with the segment, so that each is counted down once, whatever fails
                pending.segment = new

    def _settle(self, held: Sequence[_Pending], outcome: Sequence[pb.PutResult] | BaseException) -> None:
        with self._writing:
            for pending in held:
                if pending.segment is not None:
                    pending.segment.unanswered -= 1
        with self._counting:
            self._calling -= len(held)
        for _ in held:
            self._room.put(None)
        if isinstance(outcome, BaseException):
            for pending in held:
                pending.done.set_exception(outcome)
            return
        for pending, result in zip(held, outcome, strict=True):
            pending.done.set_result(result)


def _streamed(request: list[bytes]) -> bytes:
    """A ``StreamTrajectoriesRequest``."""
    return b"".join([prefix(0x0A, sum(map(len, request))), *request])


def _name(heads: Sequence[bytes], segment: LentSegment, begin: int, lengths: Sequence[int]) -> bytes:
    """A put whose payloads lie in a file."""
    at, places = begin, list[bytes]()
    for length in lengths:
        place = PayloadPlace(segment=segment.number, offset=at + _HEADER.size, length=length, lending=segment.lending)
        places.append(place.SerializeToString())
        at += _HEADER.size + length
    return batch_of(heads, PLACE, places)


def _carry(heads: Sequence[bytes], payloads: Sequence[Sequence[Piece]]) -> bytes:
    """A put whose payloads travel with it."""
    return batch_of(heads, PAYLOAD, [b"".join(payload) for payload in payloads])


def _split(records: bytes, lengths: Sequence[int]) -> list[list[Piece]]:
    """The payloads of records that were written."""
    out, at = list[list[Piece]](), 0
    for length in lengths:
        at += _HEADER.size
        out.append([records[at : at + length]])
        at += length
    return out
