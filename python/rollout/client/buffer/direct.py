"""One stream of gRPC over a plain socket.

gRPC's own client hands each message from thread to thread four times, which for small puts costs more than all the rest of
them. This speaks as much HTTP/2 (RFC 9113) as a single stream over loopback or a trusted network needs: it compresses nothing,
pads nothing, and does not read the headers that come back. So it can't tell why a stream ended; whoever needs to know asks by an
ordinary call. A peer that says nothing is asked for a sign of life, and left without one.
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
from collections.abc import Iterable, Iterator

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_ACK, _END_STREAM, _END_HEADERS, _PADDED = 1, 1, 4, 8
_NO_PUSH, _INITIAL_WINDOW = (2, 0), 4  # settings
_FRAME = struct.Struct(">HBBBI")  # length in 3 bytes, type, flags, stream
_SETTING = struct.Struct(">HI")
_MESSAGE = struct.Struct(">BI")  # whether it is compressed, length
_NUMBER = struct.Struct(">I")
_TIME = struct.Struct("ll")  # seconds and microseconds, as the system has them
_STREAM = 1
_MOST_BYTES = 16 << 10  # of a frame, which every peer takes
_FIRST_WINDOW = 65_535  # bytes that may be sent before the peer has told another number
_GRANTED = 16 << 20  # bytes that the peer may send; granted again once half of it came
_RECEIVED = 64 << 10  # bytes that are read at once
_CONNECT_SECONDS = 5.0
_QUIET_SECONDS = 7  # without a word from the peer until it is asked, and until it is given up after that
_ADDRESS = re.compile(r"([A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\]):(\d{1,5})")


class Broken(ConnectionError):
    """The peer speaks something else, or closed the connection."""


class Direct:
    """A connection with one stream on it."""

    def __init__(self, address: str, path: str, metadata: Iterable[tuple[str, str]]) -> None:
        """Connect and begin the stream. address: host:port. Raises ``OSError``, and ``ValueError`` for other addresses."""
        found = _ADDRESS.fullmatch(address)
        if found is None or int(found[2]) > 65_535:
            raise ValueError(f"{address} is not host:port")
        self._writing = threading.Lock()  # of whole frames
        self._windows = threading.Condition()
        self._room = {0: _FIRST_WINDOW, _STREAM: _FIRST_WINDOW}  # bytes that may be sent on the connection and on the stream
        self._initial = _FIRST_WINDOW
        self._ended = False
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", address),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("user-agent", "rollout-python"),
            *metadata,
        ]
        settings = _SETTING.pack(*_NO_PUSH) + _SETTING.pack(_INITIAL_WINDOW, _GRANTED)
        opening = (
            _PREFACE,
            _frame(_SETTINGS, 0, 0, settings),
            _frame(_WINDOW, 0, 0, _NUMBER.pack(_GRANTED - _FIRST_WINDOW)),
            _frame(_HEADERS, _END_HEADERS, _STREAM, b"".join(_literal(*each) for each in headers)),
        )
        self._socket = socket.create_connection((found[1].strip("[]"), int(found[2])), timeout=_CONNECT_SECONDS)
        try:
            self._socket.settimeout(None)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # settimeout would poll before each call
                self._socket.setsockopt(socket.SOL_SOCKET, option, _TIME.pack(_QUIET_SECONDS, 0))
            self._write(*opening)
        except BaseException:
            self._socket.close()
            raise

    def exchange(self, requests: Iterator[bytes]) -> Iterator[bytes]:
        """The peer's messages until it ends the stream; then the connection is closed. A thread sends the requests as they come.
        Raises ``OSError``."""
        threading.Thread(target=self._send_all, args=(requests,), name="put-requests", daemon=True).start()
        try:
            yield from self._answers()
        finally:
            self._end()
            self._socket.close()

    def _send_all(self, requests: Iterator[bytes]) -> None:
        try:
            for request in requests:
                self._send(request)
            self._write(_frame(_DATA, _END_STREAM, _STREAM, b""))
        except OSError:
            self._end()  # who reads tells
        except BaseException:
            self._end()
            raise

    def _send(self, message: bytes) -> None:
        """Send one message; waits until the peer has room for it."""
        data = memoryview(_MESSAGE.pack(0, len(message)) + message)
        while data:
            size = self._take(len(data))
            frames = list[bytes | memoryview]()
            for at in range(0, size, _MOST_BYTES):
                part = data[at : min(at + _MOST_BYTES, size)]
                frames += _head(len(part), _DATA, 0, _STREAM), part
            self._write(*frames)
            data = data[size:]

    def _answers(self) -> Iterator[bytes]:
        held, owed = bytearray(), 0
        for kind, flags, stream, body in self._frames():
            if kind == _DATA:
                if flags & _PADDED:
                    raise Broken("the peer pads its frames")
                held += body
                owed += len(body)
                if 2 * owed > _GRANTED:
                    more = _NUMBER.pack(owed)
                    self._write(_frame(_WINDOW, 0, 0, more), _frame(_WINDOW, 0, _STREAM, more))
                    owed = 0
                yield from _messages(held)
            elif kind == _SETTINGS and not flags & _ACK:
                self._settle(body)
            elif kind == _PING and not flags & _ACK:
                self._write(_frame(_PING, _ACK, 0, body))
            elif kind == _WINDOW:
                if stream not in self._room or len(body) != _NUMBER.size:
                    raise Broken("the peer grants what is not there")
                self._grant(stream, _NUMBER.unpack(body)[0])
            elif kind == _GOAWAY and not any(body[:4]):
                raise Broken("the peer goes away and takes no stream")
            if kind == _RESET or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
                return

    def _end(self) -> None:
        """Nothing is sent or read any more; who waits to do so is told."""
        with self._windows:
            self._ended = True
            self._windows.notify_all()
        with contextlib.suppress(OSError):  # the peer was first
            self._socket.shutdown(socket.SHUT_RDWR)

    def _frames(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Type, flags, stream and body of what comes."""
        data, at = b"", 0
        while True:
            while len(data) - at < 9 or len(data) - at < 9 + (size := data[at] << 16 | data[at + 1] << 8 | data[at + 2]):
                data, at = data[at:] + self._receive(), 0
                if len(data) >= 3 and (data[0] << 16 | data[1] << 8 | data[2]) > _MOST_BYTES:
                    raise Broken("the peer speaks no HTTP/2, or sends larger frames than it was told to")
            _, _, kind, flags, stream = _FRAME.unpack_from(data, at)
            yield kind, flags, stream, data[at + 9 : at + 9 + size]
            at += 9 + size

    def _receive(self) -> bytes:
        """What comes next, at least a byte."""
        for asked in (False, True):
            try:
                more = self._socket.recv(_RECEIVED)
            except BlockingIOError:
                if not asked:
                    self._write(_frame(_PING, 0, 0, bytes(8)))
                continue
            if not more:
                break
            return more
        raise Broken("the peer closed the connection, or says nothing any more")

    def _write(self, *frames: bytes | memoryview) -> None:
        with self._writing:
            self._socket.sendall(b"".join(frames))

    def _take(self, most: int) -> int:
        """Wait until the peer has room, and take up to ``most`` bytes of it."""
        with self._windows:
            while not self._ended and min(self._room.values()) <= 0:
                self._windows.wait()
            if self._ended:
                raise Broken("the peer ended the stream")
            size = min(most, *self._room.values())
            for stream in self._room:
                self._room[stream] -= size
            return size

    def _grant(self, stream: int, size: int) -> None:
        with self._windows:
            self._room[stream] += size
            self._windows.notify_all()

    def _settle(self, body: bytes) -> None:
        if len(body) % _SETTING.size:
            raise Broken("the peer cuts its settings short")
        for number, value in _SETTING.iter_unpack(body):
            if number == _INITIAL_WINDOW:
                self._grant(_STREAM, value - self._initial)
                self._initial = value
        self._write(_frame(_SETTINGS, _ACK, 0, b""))


def _messages(held: bytearray) -> Iterator[bytes]:
    """Take the whole messages out of what came."""
    while len(held) >= _MESSAGE.size:
        compressed, size = _MESSAGE.unpack_from(held)
        if compressed:
            raise Broken("a compressed message")
        if len(held) < _MESSAGE.size + size:
            return
        yield bytes(held[_MESSAGE.size : _MESSAGE.size + size])
        del held[: _MESSAGE.size + size]


def _head(size: int, kind: int, flags: int, stream: int) -> bytes:
    return _FRAME.pack(size >> 8, size & 255, kind, flags, stream)


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return _head(len(body), kind, flags, stream) + body


def _literal(name: str, value: str) -> bytes:
    """A header as it stands, which no table is to keep (RFC 7541, 6.2.3)."""
    return b"\x10" + _text(name) + _text(value)


def _text(text: str) -> bytes:
    data = text.encode("ascii")
    size = len(data)
    if size < 127:
        return bytes((size,)) + data
    out = bytearray((127,))
    size -= 127
    while size > 127:
        out.append(size & 127 | 128)
        size >>= 7
    out.append(size)
    return bytes(out) + data
