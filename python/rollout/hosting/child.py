"""Runs plugins in a child process. The parent uses ``ChildProcess``; the child runs ``python -m
rollout.hosting.child``.

The child's stdin is a socket to the parent. A frame has eight bytes with the length, and a body.
The body of a request is the method's name, a zero byte, and the message. The body of an answer is
one byte (0: a message, 1: a ``google.rpc.Status``) and the message. The first request is ``Load``,
with the sources as JSON. The output of a plugin goes to the parent's log. The child exits when the
socket closes, even during a call.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any, BinaryIO

from google.rpc import status_pb2  # pyright: ignore[reportMissingTypeStubs]

from rollout.errors import RolloutError
from rollout.hosting import wire
from rollout.hosting.host import RESPONSES, Host, Source, request_type
from rollout.plugin.v1 import plugin_pb2 as pb

_START_SECONDS = 120.0
_LENGTH = struct.Struct("<Q")
_OWN = {"ROLLOUT_WORKER_SPEC", "ROLLOUT_API_KEY"}


def environment() -> dict[str, str]:
    """This process's environment without secrets: the worker's spec, the API key, and the headers
    of the OTLP exporter."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _OWN and not (name.startswith("OTEL_EXPORTER_OTLP_") and name.endswith("HEADERS"))
    }


class ChildProcess:
    """A :class:`~rollout.hosting.runner.Runner` with a separate process, which may hang, crash,
    print, or block its interpreter.

    The process answers one call at a time; others wait. After a timeout or a crash the process is
    killed and ``broken``, and the next call starts another.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = list(sources)
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._turn = asyncio.Lock()
        self.broken = False

    @property
    def pid(self) -> int:
        """The process id; valid after ``start``."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> pb.HandshakeResponse:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rollout.hosting.child"],
                stdin=theirs.fileno(),
                start_new_session=True,  # so that processes that the plugin starts end with it
                env={**environment(), "PYTHONUNBUFFERED": "1"},
            )
        ours.setblocking(False)
        self._streams = await asyncio.open_connection(sock=ours, limit=1 << 20)
        try:
            sources = json.dumps([dict(source) for source in self._sources]).encode()
            await self._exchange("Load", sources, _START_SECONDS, "importing the plugin")
            return await self._call("Handshake", pb.HandshakeRequest(schema_version=wire.SCHEMA_VERSION), 10.0)
        except BaseException:
            await self.close()
            raise

    async def call(self, method: str, request: Any, timeout: float) -> Any:
        async with self._turn:
            if self.broken:
                await self.start()
            return await self._call(method, request, timeout)

    async def _call(self, method: str, request: Any, timeout: float) -> Any:
        body = await self._exchange(method, request.SerializeToString(), timeout, wire.describe(method, request))
        return RESPONSES[method].FromString(body)

    async def close(self) -> None:
        self.kill()

    def kill(self) -> None:
        """End the process and all processes that it started."""
        self.broken = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()  # a killed process ends at once
        if self._streams is not None:
            self._streams[1].transport.abort()

    async def _exchange(self, method: str, message: bytes, timeout: float, what: str) -> bytes:
        """Send a request and return its answer. Raises ``RolloutError``."""
        self.broken = True  # until the answer is read in full
        try:
            async with asyncio.timeout(timeout):
                answer = await self._send(method.encode() + b"\0" + message)
        except TimeoutError:
            self.kill()
            raise wire.timeout_error(method, timeout, what) from None
        except (OSError, asyncio.IncompleteReadError):
            code = await self._ended()
            self.kill()
            raise wire.ended_error(method, f"{what} ended its process ({code})", "see the worker's log") from None
        except BaseException:
            self.kill()
            raise
        self.broken = False
        if answer[0]:
            raise wire.error_of(status_pb2.Status.FromString(answer[1:]))
        return answer[1:]

    async def _send(self, body: bytes) -> bytes:
        assert self._streams is not None
        reader, writer = self._streams
        writer.write(_LENGTH.pack(len(body)) + body)
        await writer.drain()
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return await reader.readexactly(size)

    async def _ended(self) -> str:
        assert self._process is not None
        try:
            code = await asyncio.to_thread(self._process.wait, 1)
        except subprocess.TimeoutExpired:
            return "it closed the connection"
        return f"signal {-code}" if code < 0 else f"exit code {code}"


def main() -> None:
    """Answer requests until the socket closes."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(0), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    arrived: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, arrived), daemon=True).start()
    host = Host({})
    with asyncio.Runner() as runner:
        while True:
            name, _, body = arrived.get().partition(b"\0")
            method = name.decode()
            try:
                if method == "Load":
                    host, answer = Host.load(json.loads(body)), b"\0"
                else:
                    answer = b"\0" + runner.run(host.call(method, request_type(method).FromString(body))).SerializeToString()
            except Exception as error:
                if not isinstance(error, RolloutError):
                    error = wire.PluginError(f"{method} raised {type(error).__name__}: {error}")
                answer = b"\1" + wire.status_of(error).SerializeToString()
            sys.stdout.flush()
            answers.write(_LENGTH.pack(len(answer)) + answer)
            answers.flush()


def _read(pipe: BinaryIO, arrived: queue.SimpleQueue[bytes]) -> None:
    """Read requests until the socket closes, then exit the process, even during a request."""
    try:
        while len(head := pipe.read(_LENGTH.size)) == _LENGTH.size:
            (size,) = _LENGTH.unpack(head)
            if len(body := pipe.read(size)) < size:
                return
            arrived.put(body)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
