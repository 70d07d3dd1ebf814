"""Runs plugins in a child process. The parent uses ``ChildProcess``; the child runs ``python -m
rollout.hosting.child``.

The child's stdin is a socket to the parent; in a box (``boxed.py``) stdin and stdout are pipes. A
frame has eight bytes with its length, eight with the number of the call, and a body. The body of a
request is the method's name, a zero byte, and the message. The body of an answer is one byte (0: a
message, 1: a ``google.rpc.Status``) and the message. The first request is ``Load``, with the
sources as JSON; ``Cancel`` has no answer; ``Stack`` is answered at once, with the lines of the
user's code that are executed (``look.py``). Calls of environments overlap. The output of a
plugin goes to the parent's log. The child exits when the socket closes, even during a call.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import logging
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, BinaryIO

from google.rpc import status_pb2  # pyright: ignore[reportMissingTypeStubs]

from rollout import checkpoint
from rollout.errors import RolloutError
from rollout.hosting import wire
from rollout.hosting.host import RESPONSES, Host, Source, request_type
from rollout.hosting.lines import here, prepare
from rollout.hosting.look import Watched
from rollout.hosting.parent import end_with_parent
from rollout.plugin.v1 import plugin_pb2 as pb

START_SECONDS = 120.0
_CANCEL_SECONDS = 2.0
"""How long a cancelled call of an environment may take to end."""
KILLED_SECONDS = 1.0
"""How long a killed process may take to end. One that waits in the kernel may never."""
log = logging.getLogger(__name__)
HEAD = struct.Struct("<QQ")
_KILLED = "; if no one killed it, the kernel did for its memory: see `dmesg`"
_OWN = {"ROLLOUT_WORKER_SPEC", "ROLLOUT_API_KEY"}


def environment() -> dict[str, str]:
    """This process's environment without secrets: the worker's spec, the API key, and the headers
    of the OTLP exporter."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _OWN and not (name.startswith("OTEL_EXPORTER_OTLP_") and name.endswith("HEADERS"))
    }


def reap(process: subprocess.Popen[bytes], what: str) -> threading.Thread | None:
    """Wait in a thread for a process that was killed; None if it has ended. what: its plugin."""

    def wait() -> None:
        try:
            process.wait(KILLED_SECONDS)  # a killed process ends at once
        except subprocess.TimeoutExpired:
            log.warning("process %d of %s does not end: it waits in the kernel for a file system", process.pid, what)

    if process.poll() is not None:
        return None
    thread = threading.Thread(target=wait, name="reap", daemon=True)
    thread.start()
    return thread


async def reaped(thread: threading.Thread | None) -> None:
    """Wait for a thread of ``reap``."""
    if thread is not None:
        await asyncio.to_thread(thread.join)


class ChildProcess:
    """A :class:`~rollout.hosting.runner.Runner` with a separate process, which may hang, crash,
    print, or block its interpreter.

    The process answers one call at a time; others wait. Calls of environments overlap. After a
    timeout or a crash the process is killed and ``broken``, and the next call starts another. Only
    a call of an environment that ends when it is cancelled leaves the process alive, because its
    death would end the other episodes.
    """

    def __init__(self, sources: Sequence[Source], command: Sequence[str] = (sys.executable,)) -> None:
        """command: the Python interpreter, with arguments before ``-m``."""
        self._watched = Watched(lambda: self._pid, self._stack)
        self._sources, self._command = list(sources), list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = itertools.count()
        self._turn, self._starting = asyncio.Lock(), asyncio.Lock()
        self._watches: set[asyncio.Task[None]] = set()
        self._blocked_by = ""
        """The call that blocked the process, which was killed therefore; empty if none did."""
        self._reaping: threading.Thread | None = None
        self.broken = False

    @property
    def pid(self) -> int:
        """The process id; valid after ``start``."""
        assert self._process is not None
        return self._pid

    async def start(self) -> pb.HandshakeResponse:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*self._command, "-m", "rollout.hosting.child"],
                stdin=theirs.fileno(),
                start_new_session=True,  # so that processes that the plugin starts end with it
                env={**environment(), "PYTHONUNBUFFERED": "1"},
            )
        self._pid = self._process.pid
        await self._connect(ours)
        try:
            sources = json.dumps([dict(source) for source in self._sources]).encode()
            await self._exchange("Load", sources, START_SECONDS, "importing the plugin")
            handshake = await self._call("Handshake", pb.HandshakeRequest(schema_version=wire.SCHEMA_VERSION), 10.0)
        except BaseException:
            await self.close()
            raise
        self.broken = False
        return handshake

    async def _connect(self, ours: socket.socket) -> None:
        ours.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        self._answers, self._blocked_by = {}, ""
        self._reading = asyncio.create_task(_receive(reader, self._answers), name="plugin")

    async def save(self, folder: str, *, keep: bool = True) -> None:
        """Save the process to a new folder, between two calls: its episodes continue from there.
        keep: they also continue here. Raises ``CheckpointError``."""
        if self._answers:
            raise checkpoint.CheckpointError(
                "PROCESS_BUSY", "a call of the process is in progress", fix="save it between two calls"
            )
        await checkpoint.save(self.pid, folder, keep=keep)
        if not keep:
            await self.close()

    async def restore(self, folder: str, *, network: str = "") -> None:
        """Continue a saved process, instead of ``start``. The folder can be restored several times.
        network: path of the network namespace to continue in. Raises ``CheckpointError``."""
        ours, theirs = socket.socketpair()
        with theirs:
            connected = {checkpoint.stream(folder): theirs.fileno()}
            restored = await checkpoint.restore(folder, connected, network=network)
        self._process, self._pid = restored.keeper, restored.pid
        await self._connect(ours)
        self.broken = False

    async def call(self, method: str, request: Any, timeout: float) -> Any:
        if wire.of_environment(method):
            await self._alive()
            return await self._call(method, request, timeout)
        async with self._turn:
            await self._alive()
            return await self._call(method, request, timeout)

    async def _alive(self) -> None:
        async with self._starting:
            if self.broken:
                await self.start()

    async def _call(self, method: str, request: Any, timeout: float) -> Any:
        body = await self._exchange(method, request.SerializeToString(), timeout, wire.describe(method, request))
        return RESPONSES[method].FromString(body)

    async def close(self) -> None:
        self.kill()
        await reaped(self._reaping)

    def kill(self) -> None:
        """End the process and all processes that it started."""
        self.broken = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._reaping = reap(self._process, "the plugin")
        if self._writer is not None:
            self._writer.transport.abort()

    async def _exchange(self, method: str, message: bytes, timeout: float, what: str) -> bytes:
        """Send a request and return its answer. Raises ``RolloutError``."""
        number, answers, process = next(self._numbers), self._answers, self._process
        overlapping = wire.of_environment(method)
        answered = answers[number] = asyncio.get_running_loop().create_future()
        self._watched.open[number] = (method, time.monotonic())
        try:
            async with asyncio.timeout(timeout):
                await self._send(number, method.encode() + b"\0" + message)
                answer = await answered
        except TimeoutError:
            blocked = not (overlapping and await self._cancelled(number))
            if blocked:
                self._kill_only(process, what)
            raise wire.timeout_error(method, timeout, what, blocked=overlapping and blocked) from None
        except (OSError, EOFError):
            if process is self._process and self._blocked_by:
                raise wire.ended_error(
                    method,
                    f"{what} has no answer, because {self._blocked_by} blocked the process, which was ended",
                    "await in the method that blocked, or run its work in a thread",
                ) from None
            code = await _ended(process)
            self._kill_only(process)
            fix = "see the worker's log" + (_KILLED if code == f"signal {signal.SIGKILL.value}" else "")
            raise wire.ended_error(method, f"{what} ended its process ({code})", fix) from None
        except BaseException:
            if not overlapping:
                self._kill_only(process)
            elif not self.broken:
                self._watch_cancelled(number, process, what)
            raise
        finally:
            self._watched.open.pop(number, None)
            if answers.get(number) is answered:
                del answers[number]
        if answer[0]:
            raise wire.error_of(status_pb2.Status.FromString(answer[1:]))
        return answer[1:]

    async def _stack(self) -> bytes:
        """The answer to ``Stack``. Raises ``OSError``, ``EOFError``."""
        number, answers = next(self._numbers), self._answers
        answered = answers[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send(number, b"Stack")
            return (await answered)[1:]
        finally:
            answers.pop(number, None)

    def _watch_cancelled(self, number: int, process: subprocess.Popen[bytes] | None, what: str) -> None:
        """Cancel a call in the background, and kill the process if it is blocked."""

        async def watch() -> None:
            if not await self._cancelled(number):
                self._kill_only(process, what)

        task = asyncio.create_task(watch(), name="cancel")
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)

    def _kill_only(self, process: subprocess.Popen[bytes] | None, blocked_by: str = "") -> None:
        """Kill the process of a call, unless another one has replaced it."""
        if process is self._process:
            self._blocked_by = self._blocked_by or blocked_by
            self.kill()

    async def _send(self, number: int, body: bytes) -> None:
        assert self._writer is not None
        self._writer.write(HEAD.pack(len(body), number) + body)
        await self._writer.drain()

    async def _cancelled(self, number: int) -> bool:
        """Cancel a call. Whether the process then answers it, so that it is not blocked."""
        answers = self._answers
        answered = answers[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(_CANCEL_SECONDS):
                await self._send(number, b"Cancel")
                await answered
        except (TimeoutError, OSError, EOFError):
            return False
        finally:
            answers.pop(number, None)
        return True


async def _receive(reader: asyncio.StreamReader, answers: dict[int, asyncio.Future[bytes]]) -> None:
    """Give each answer to its call. When the connection ends, all calls fail with ``EOFError``."""
    try:
        while True:
            size, number = HEAD.unpack(await reader.readexactly(HEAD.size))
            body = await reader.readexactly(size)
            if (answered := answers.get(number)) is not None and not answered.done():
                answered.set_result(body)
    except (OSError, asyncio.IncompleteReadError):
        pass
    finally:
        for answered in answers.values():
            if not answered.done():
                answered.set_exception(EOFError())


async def _ended(process: subprocess.Popen[bytes] | None) -> str:
    assert process is not None
    try:
        code = await asyncio.to_thread(process.wait, 1)
    except subprocess.TimeoutExpired:
        return "it closed the connection"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def main() -> None:
    """Answer requests until the socket closes."""
    boxed = not stat.S_ISSOCK(os.fstat(0).st_mode)
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1 if boxed else 0), "wb")
    if boxed:
        os.dup2(2, 1)  # output of the user's code
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    if not boxed:
        end_with_parent()
        prepare()
    asyncio.run(_Child(requests, answers, boxed).run())


_NETWORK = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ECONNREFUSED, errno.EADDRNOTAVAIL}


def exhausted(error: BaseException | None) -> str:
    """What the sandbox of a plugin lacks, if that is why it raised: a reason; empty if not."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        code = error.errno if isinstance(error, OSError) else None
        if isinstance(error, MemoryError) or code == errno.ENOMEM:
            return "REWARD_OUT_OF_MEMORY"
        if isinstance(error, socket.gaierror) or code in _NETWORK:
            return "REWARD_NO_NETWORK"
        if code == errno.EAGAIN or (isinstance(error, RuntimeError) and "can't start new thread" in str(error)):
            return "REWARD_PIDS_LIMIT"
        if code in (errno.ENOSPC, errno.EDQUOT):
            return "REWARD_DISK_LIMIT"
        error = error.__cause__ or error.__context__
    return ""


class _Child:
    """The process of the plugins: one task per call."""

    def __init__(self, requests: BinaryIO, answers: BinaryIO, boxed: bool) -> None:
        self._requests, self._answers, self._boxed = requests, answers, boxed
        self._host = Host({})
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._writing = threading.Lock()

    async def run(self) -> None:
        arrived: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
        threading.Thread(target=self._read, args=(asyncio.get_running_loop(), arrived), daemon=True).start()
        while True:
            number, request = await arrived.get()
            if request == b"Cancel":
                if (call := self._calls.get(number)) is not None:
                    call.cancel()
                else:
                    self._reply(number, b"\0")  # it has just ended
                continue
            name, _, body = request.partition(b"\0")
            self._calls[number] = asyncio.create_task(self._answer(number, name.decode(), body))

    async def _answer(self, number: int, method: str, body: bytes) -> None:
        try:
            if method == "Load":
                self._host, answer = Host.load(json.loads(body)), b"\0"
            else:
                answer = b"\0" + (await self._host.call(method, request_type(method).FromString(body))).SerializeToString()
        except asyncio.CancelledError:
            answer = b"\1" + wire.status_of(wire.PluginTimeout("the call was cancelled")).SerializeToString()
        except Exception as error:
            if self._boxed and (reason := exhausted(error)):
                error = wire.with_reason(error, reason)
            if not isinstance(error, RolloutError):
                error = wire.PluginError(f"{method} raised {type(error).__name__}: {error}")
            answer = b"\1" + wire.status_of(error).SerializeToString()
        self._calls.pop(number, None)
        self._reply(number, answer)

    def _reply(self, number: int, answer: bytes) -> None:
        sys.stdout.flush()
        self._write(number, answer)

    def _write(self, number: int, answer: bytes) -> None:
        with self._writing:
            self._answers.write(HEAD.pack(len(answer), number) + answer)
            self._answers.flush()

    def _read(self, loop: asyncio.AbstractEventLoop, arrived: asyncio.Queue[tuple[int, bytes]]) -> None:
        """Read requests until the socket closes, then exit the process, even during a request."""
        try:
            while len(head := self._requests.read(HEAD.size)) == HEAD.size:
                size, number = HEAD.unpack(head)
                if len(body := self._requests.read(size)) < size:
                    return
                if body == b"Stack":
                    self._write(number, b"\0" + _lines(loop))
                    continue
                loop.call_soon_threadsafe(arrived.put_nowait, (number, body))
        finally:
            os._exit(0)


def _lines(loop: asyncio.AbstractEventLoop) -> bytes:
    try:
        return here(loop)
    except Exception:  # an error here would end the process
        return b"[]"


if __name__ == "__main__":
    main()
