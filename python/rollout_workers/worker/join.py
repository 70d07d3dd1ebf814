"""``rollout-worker KIND --join ADDRESS --token FILE``: a place for one worker of a kind, which an
operator starts on any host that has the files of the scheduler (docs/external-workers.md).

The place joins the scheduler and runs the workers that it is assigned, one at a time, each in a
separate process::

    joining --> free --assignment--> busy --exit--> free
       ^                              |
       +-- backoff <-- stream ended --+    SIGTERM: the worker finishes its work, then the place leaves

The worker's standard input is a pipe of the place, so it exits when the place does, for any reason.
When the stream to the scheduler ends, the worker is stopped: the scheduler starts another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import grpc
import grpc.aio

from rollout.channel import OPTIONS
from rollout.run.v1.run_pb2 import Assignment, JoinRequest, JoinResponse, Place, PlaceLeaves, WorkerExited, WorkerStarted
from rollout.run.v1.run_pb2_grpc import PlaceServiceStub
from rollout.secret import SecretError, read_secret
from rollout_workers.worker.lifecycle import EXIT_DONE, EXIT_REFUSED, leave_now
from rollout_workers.worker.spec import SPEC_VARIABLE
from rollout_workers.worker.tls import CertificateError, PemFiles

log = logging.getLogger(__name__)

EXIT_HARD = 130
KINDS = ("inference", "learner", "reward", "environment")
"""The kinds of workers that can join."""
LAST_LINES = 20
LINE_BYTES = 2000
"""Bytes of each last line that are reported."""
FIRST_BACKOFF, MAX_BACKOFF = 0.5, 5.0
STOP_SECONDS = 2.0
"""How long a worker may take to exit after its standard input has closed."""
_PERMANENT = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
}
"""Answers that another attempt does not change."""


@dataclass(frozen=True, slots=True)
class Joining:
    """Where and how to join.

    addresses: host:port of each `rolloutd` that hosts a scheduler; they are tried in turn.

    token: file of the mesh token (0600).

    insecure: permit to send the token in plain text to an address that is not loopback.

    program: starts a worker when the kind is appended.
    """

    kind: str
    addresses: Sequence[str]
    token: str
    tls: PemFiles = field(default_factory=PemFiles)
    insecure: bool = False
    program: Sequence[str] = (sys.executable, "-P", "-m", "rollout_workers")

    def exposed(self) -> str:
        """The first address that would get the token in plain text over a network; else empty."""
        if self.tls.ca or self.insecure:
            return ""
        return next((address for address in self.addresses if not _loopback(address)), "")


async def join(joining: Joining) -> int:
    """Serve as a place until SIGTERM or SIGINT, and return the exit code."""
    return await _Place(joining).run()


def _loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]") or address
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Place:
    def __init__(self, joining: Joining) -> None:
        self._joining = joining
        self._leaving = asyncio.Event()
        self._signals = 0
        self._worker: _Worker | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        wait, attempt, shown = FIRST_BACKOFF, 0, ""
        while not self._leaving.is_set():
            address = self._joining.addresses[attempt % len(self._joining.addresses)]
            attempt += 1
            try:
                joined = await self._serve(address)
                wait, shown = FIRST_BACKOFF if joined else wait, ""
            except grpc.aio.AioRpcError as error:
                why = f"{error.code().name}: {error.details()}"
                if error.code() in _PERMANENT:
                    log.error("can't join %s: %s", address, why)
                    return EXIT_REFUSED
                if why != shown:
                    log.warning("no connection to %s (%s); it is tried again", address, why)
                    shown = why
            except (SecretError, CertificateError) as error:
                log.error("can't join: %s", error)
                return EXIT_REFUSED
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._leaving.wait()
            wait = min(2 * wait, MAX_BACKOFF)
        return EXIT_DONE

    def _on_signal(self) -> None:
        self._signals += 1
        if self._signals > 1:
            if self._worker:
                self._worker.kill()
            leave_now(EXIT_HARD)
        log.info("leaving: the worker finishes its work; send the signal again to stop at once")
        self._leaving.set()

    async def _serve(self, address: str) -> bool:
        """Be a place at one scheduler until the stream ends. Whether it was joined."""
        token = read_secret(f"file:{os.path.abspath(self._joining.token)}", "--token")
        tls = self._joining.tls
        if tls.ca:
            channel = grpc.aio.secure_channel(address, tls.channel(), OPTIONS)
        else:
            channel = grpc.aio.insecure_channel(address, OPTIONS)
        async with channel:
            stream = PlaceServiceStub(channel).Join(metadata=(("authorization", f"Bearer {token}"),))
            connection = _Connection(stream)
            leaving = asyncio.create_task(self._leave(connection))
            joined = False
            try:
                await connection.send(
                    JoinRequest(place=Place(kind=self._joining.kind, host=socket.gethostname(), pid=os.getpid()))
                )
                log.info("joined %s for workers of the kind %s", address, self._joining.kind)
                while (order := await connection.receive()) is not None:
                    joined = True
                    self._obey(order, connection)
                return joined
            finally:
                leaving.cancel()
                if self._worker:
                    await self._worker.abandon()
                    self._worker = None

    async def _leave(self, connection: _Connection) -> None:
        await self._leaving.wait()
        await connection.send(JoinRequest(leaves=PlaceLeaves()))
        if self._worker and not self._worker.done:
            self._worker.stop(None)
            await self._worker.reported()
        await connection.close()

    def _obey(self, order: JoinResponse, connection: _Connection) -> None:
        match order.WhichOneof("order"):
            case "assignment":
                self._worker = _Worker(order.assignment, [*self._joining.program, self._joining.kind], connection)
            case "stop" if self._worker and self._worker.id == order.stop.id:
                self._worker.stop(order.stop.grace_ms / 1000)
            case _:
                pass


class _Connection:
    """A stream on which several tasks send."""

    def __init__(self, stream: grpc.aio.StreamStreamCall[JoinRequest, JoinResponse]) -> None:
        self._stream = stream
        self._sending = asyncio.Lock()

    async def send(self, report: JoinRequest) -> None:
        """Send a report, unless the stream has ended, which receive reports."""
        async with self._sending:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self._stream.write(report)

    async def receive(self) -> JoinResponse | None:
        """The next order; None at the end. Raises ``AioRpcError``."""
        order = await self._stream.read()
        return order if isinstance(order, JoinResponse) else None

    async def close(self) -> None:
        async with self._sending:
            await self._stream.done_writing()


class _Worker:
    """The process of one assignment. It reports its start and its exit."""

    def __init__(self, assignment: Assignment, command: Sequence[str], connection: _Connection) -> None:
        self.id = assignment.id
        self._assignment, self._command, self._connection = assignment, command, connection
        self._process: asyncio.subprocess.Process | None = None
        self._spawned = asyncio.Event()
        """Set when the process has been started, or could not be."""
        self._stopping: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._run())

    @property
    def done(self) -> bool:
        return self._task.done()

    async def reported(self) -> None:
        """Return when the exit has been reported."""
        await asyncio.wait({self._task})

    def stop(self, grace: float | None) -> None:
        """Ask the process to exit, once it has been started, and kill it after the grace period;
        None: never."""
        if not self.done:
            self._stopping.add(asyncio.create_task(self._stop(grace)))

    def kill(self) -> None:
        if self._process and not self.done:
            _kill_group(self._process.pid)

    async def abandon(self) -> None:
        """End the process, because its exit can be reported to no one."""
        await self._spawned.wait()
        if self._process and self._process.stdin:
            self._process.stdin.close()
        await asyncio.wait({self._task}, timeout=STOP_SECONDS)
        self.kill()
        await asyncio.wait({self._task})

    async def _stop(self, grace: float | None) -> None:
        await self._spawned.wait()
        if self._process:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
        if grace is not None:
            await asyncio.sleep(grace)
            self.kill()

    async def _run(self) -> None:
        try:
            process, output = await self._start()
        except OSError as error:
            log.error("the worker can't be started: %s", error)
            await self._connection.send(JoinRequest(exited=WorkerExited(id=self.id, code=-1, not_started=str(error)[:4096])))
            return
        finally:
            self._spawned.set()
        last: list[str] = []
        try:
            log.info("started a worker (process %d); its log is %s", process.pid, self._assignment.log)
            await self._connection.send(JoinRequest(started=WorkerStarted(id=self.id)))
            assert process.stdout is not None
            last = await _copy(process.stdout, output)
            await process.wait()
        except OSError as error:
            log.error("the output of the worker can't be read: %s", error)
        finally:
            _kill_group(process.pid)
            code = await process.wait()
            for task in self._stopping:
                task.cancel()
            with contextlib.suppress(OSError):
                output.close()
        log.info("the worker has exited with %s", code)
        exited = WorkerExited(id=self.id, code=max(code, -1), last_lines=last)
        if code < 0:
            exited.signal = (signal.strsignal(-code) or str(-code)).lower()
        await self._connection.send(JoinRequest(exited=exited))

    async def _start(self) -> tuple[asyncio.subprocess.Process, BinaryIO]:
        """The process, whose output goes to a pipe, and its log. Raises ``OSError``."""
        variables = dict(variable.split("=", 1) for variable in self._assignment.environment)
        if missing := unshared(variables):
            raise FileNotFoundError(missing)
        output = Path(self._assignment.log).open("ab", buffering=0)  # noqa: SIM115 the process outlives this call
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **variables},
                cwd=self._assignment.directory or None,
                process_group=0,
            )
        except BaseException:
            output.close()
            raise
        return self._process, output


def unshared(variables: Mapping[str, str]) -> str:
    """Why a worker with these variables can't start on this host: its spec is missing here. Empty
    if it can."""
    spec = variables.get(SPEC_VARIABLE, "")
    if not spec or Path(spec).exists():
        return ""
    return f"this host ({socket.gethostname()}) has no {spec}; mount the scheduler's shared folder (shared_dir) at the same path"


async def _copy(source: asyncio.StreamReader, file: BinaryIO) -> list[str]:
    """Append the output of a process to its unbuffered log, and return the last lines. A log that
    can't be written, because the disk is full, never stops the process: its lines are dropped."""
    last, rest, dropped = deque[bytes](maxlen=LAST_LINES), b"", False
    while chunk := await source.read(1 << 16):
        try:
            file.write(chunk)
        except OSError as error:
            if not dropped:
                log.warning("the log of the worker can't be written, so its lines are dropped: %s", error)
            dropped = True
        *lines, rest = (rest + chunk).split(b"\n")
        last.extend(line[:LINE_BYTES] for line in lines)
        rest = rest[:LINE_BYTES]
    if rest:
        last.append(rest)
    return [line.decode(errors="replace") for line in last]


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
