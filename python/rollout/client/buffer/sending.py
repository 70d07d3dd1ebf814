"""Sends puts to the buffer: stream after stream, and by calls what a stream leaves unanswered."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any, cast

import grpc

from rollout.buffer.v1 import buffer_pb2 as pb
from rollout.client.buffer.calls import call
from rollout.client.buffer.direct import Direct
from rollout.client.buffer.pending import Pending
from rollout.client.buffer.segments import Segments
from rollout.client.buffer.wire import prefix, request_of
from rollout.client.errors import RemoteError

_REQUESTS = 2  # unanswered ones of a stream: one is on its way while another is made durable
_MOST_PUTS = 256  # of one request
_MOST_BYTES = 32 << 20  # of inline payloads of one request
_SMALL_BYTES = 256 << 10  # of payloads up to which a request waits for more puts
_WAIT_SECONDS = 0.001
_REFUSALS = 3  # plain sockets in a row without an answer, after which none is tried any more
_WAKE = object()
log = logging.getLogger(__name__)
_SERVICE = f"/{pb.DESCRIPTOR.services_by_name['BufferService'].full_name}/"  # whose requests are made of bytes


class _Stream:
    """Puts that went into one stream and are not answered yet, oldest first."""

    def __init__(self, first: list[Pending]) -> None:
        self.unanswered, self.ended = deque([first]), False
        self._lock = threading.Lock()
        self._room = threading.Semaphore(_REQUESTS - 1)

    def room(self) -> bool:
        """Wait until another request may be sent; False where the stream has ended."""
        self._room.acquire()
        return not self.ended

    def add(self, held: list[Pending]) -> bool:
        with self._lock:
            if not self.ended:
                self.unanswered.append(held)
            return not self.ended

    def answered(self) -> list[Pending]:
        with self._lock:
            held = self.unanswered.popleft()
        self._room.release()
        return held

    def end(self) -> list[list[Pending]]:
        """Nothing is added any more; what was not answered."""
        with self._lock:
            self.ended = True
        self._room.release()
        return list(self.unanswered)


class Sender:
    """Keeps a stream open. Puts that come while a request is under way travel together with the next one, so small ones share
    messages and syncs."""

    def __init__(
        self,
        channel: grpc.Channel,
        metadata: tuple[tuple[str, str], ...],
        run: str,
        segments: Segments,
        room: SimpleQueue[None],
        *,
        in_flight: int,
        address: str,
    ) -> None:
        """room: gets one for each put that is settled. address: host:port where a plain socket is tried first."""
        bare = cast(Any, channel)
        self._put = bare.unary_unary(_SERVICE + "PutTrajectories", None, pb.PutTrajectoriesResponse.FromString)
        self._stream = bare.stream_stream(_SERVICE + "StreamTrajectories", None, pb.StreamTrajectoriesResponse.FromString)
        self._metadata, self._address = metadata, address
        self._refused = 0  # plain sockets in a row
        self._head = pb.PutTrajectoriesRequest(run_id=run).SerializeToString()
        self._segments, self._room, self._in_flight = segments, room, in_flight
        self._queue: SimpleQueue[Any] = SimpleQueue()  # of Pending, _WAKE, and None at the end
        self._gathering = threading.Lock()  # one thread at a time
        self._window = threading.Condition()  # of _calling
        self._calling = 0  # puts that are in requests and not answered
        self._ended = False  # the end was taken from the queue
        self._thread = threading.Thread(target=self._send, name="put", daemon=True)
        self._thread.start()

    def queue(self, pending: Pending) -> None:
        """Send a put with the next request."""
        self._queue.put(pending)

    def close(self) -> None:
        """End once everything that was queued is settled, and give the files back."""
        self._queue.put(None)
        self._thread.join()
        if self._segments.close():
            with contextlib.suppress(RemoteError):  # else they are idle soon
                self._call([])

    def _send(self) -> None:
        """Put what is queued, stream after stream, until the end. Runs in the sender."""
        while not self._ended and (held := self._gather(None)):
            self._follow(_Stream(held))

    def _follow(self, stream: _Stream) -> None:
        """Put through one stream until it ends. What it leaves unanswered is put by calls, which say why where that fails too."""
        plain = False
        try:
            answers, plain = self._exchange(stream)
            for answer in answers:
                self._settle(stream.answered(), answer.answer.results)
                plain, self._refused = False, 0
        except Exception as error:  # a call tells, where it has not gone by itself
            log.info("a stream of puts ended: %s: %s", type(error).__name__, error)
        self._refused += plain
        left = stream.end()
        self._queue.put(_WAKE)  # who gathers for it
        for held in left:
            try:
                results = self._call(held)
            except BaseException as error:
                self._settle(held, error)
            else:
                self._settle(held, results)

    def _exchange(self, stream: _Stream) -> tuple[Iterator[pb.StreamTrajectoriesResponse], bool]:
        """The answers to the requests of a stream, and whether they come by a plain socket."""
        if self._address and self._refused < _REFUSALS:
            try:
                direct = Direct(self._address, _SERVICE + "StreamTrajectories", self._metadata)
            except ConnectionRefusedError:
                pass  # nobody serves there just now
            except (OSError, ValueError):
                self._refused += 1
            else:
                return map(pb.StreamTrajectoriesResponse.FromString, direct.exchange(self._requests(stream))), True
        return self._stream(self._requests(stream), metadata=self._metadata), False

    def _requests(self, stream: _Stream) -> Iterator[bytes]:
        """The requests of a stream. Runs in a thread of its transport's, which takes one when it can send it."""
        yield _streamed(self._request(stream.unanswered[0]))
        while stream.room():
            held = self._gather(stream)
            if not held:
                return
            if not stream.add(held):  # it ended meanwhile
                self._leave(len(held))
                for pending in held:
                    self._queue.put(pending)
                return
            yield _streamed(self._request(held))

    def _gather(self, stream: _Stream | None) -> list[Pending]:
        """The next puts of one request, as many as may be in flight beside those that are; nothing at the end, or where the
        stream has ended. Small ones wait a moment for company."""
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
            with self._window:
                while self._calling >= self._in_flight:
                    self._window.wait()
                most = min(_MOST_PUTS, self._in_flight - self._calling)
            while len(held) < most and carried < _MOST_BYTES:
                try:
                    pending = self._queue.get(size < _SMALL_BYTES, _WAIT_SECONDS)
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
            with self._window:
                self._calling += len(held)
            return held

    def _leave(self, puts: int) -> None:
        with self._window:
            self._calling -= puts
            self._window.notify_all()

    def _request(self, held: Sequence[Pending]) -> list[bytes]:
        """A ``PutTrajectoriesRequest`` in pieces."""
        returned = self._segments.returned()
        rest = pb.PutTrajectoriesRequest(returned=returned).SerializeToString() if returned else b""
        return request_of(self._head, (pending.batch for pending in held), rest)

    def _call(self, held: Sequence[Pending]) -> Sequence[pb.PutResult]:
        while True:
            try:
                return call(self._put, b"".join(self._request(held)), self._metadata).results
            except RemoteError as error:
                if error.reason != "SEGMENT_NOT_LENT":
                    raise
            self._segments.rewrite(held)

    def _settle(self, held: Sequence[Pending], outcome: Sequence[pb.PutResult] | BaseException) -> None:
        if not isinstance(outcome, BaseException) and len(outcome) != len(held):
            outcome = ConnectionError(f"the buffer answered {len(outcome)} of {len(held)} puts")
        self._segments.answered(held)
        self._leave(len(held))
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
