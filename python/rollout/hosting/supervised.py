"""Starts, watches, and restarts the program of a manifest (``manifest.py``)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollout.errors import RolloutError
from rollout.hosting import wire
from rollout.hosting.child import environment, reap, reaped
from rollout.hosting.host import KINDS
from rollout.hosting.manifest import Manifest
from rollout.hosting.sidecar import ADDRESS_VARIABLE, ARGS_VARIABLE, Sidecar
from rollout.plugin.v1 import plugin_pb2 as pb

log = logging.getLogger(__name__)

_PURE = ("Reward", "Evaluate", "ReadRows", "Handshake")
"""Methods without side effects: a call that its process did not survive is repeated."""
_TRIES = 3
"""How many processes one call of these may end."""
_FIRST_SECONDS, _MOST_SECONDS = 0.1, 30.0
_HEALTH_SECONDS = 2.0
_MOST_TIMEOUTS = 3
"""Calls in a row that miss their deadline, after which the process is replaced."""
_LOOK_SECONDS = 1.0
_PREFIX = "rollout-plugin-"
_SHOWN_SECONDS = 60.0

Verify = Callable[[], Awaitable[None]]
"""Raises ``RolloutError`` if a file of a plugin has changed since the run was planned."""


async def unpinned() -> None:
    """A :data:`Verify` of a plugin that no plan pins."""


@dataclass(frozen=True, slots=True)
class Condition:
    """What is wrong with a plugin. reason: ``PLUGIN_RESTARTING``, ``PLUGIN_BLOCKED``, or
    ``PLUGIN_LEAKS``. since: seconds since 1970. ongoing: whether calls wait for it; otherwise it
    was in the last minute."""

    reason: str
    name: str
    text: str
    fix: str
    since: float
    ongoing: bool = True


class SupervisedSidecar:
    """A :class:`~rollout.hosting.runner.Runner` of a manifest. Belongs to one event loop; calls may
    overlap.

    A process that ends is started again: at once, then after 0.1 s, 0.2 s, and so on up to 30 s,
    until a call succeeds. It is replaced if it answers neither a call nor a health check
    (``PLUGIN_BLOCKED``), and if its memory exceeds ``memory_bytes`` (``PLUGIN_LEAKS``): then its
    open calls end first. A call waits for the start within its deadline. A reward that the process
    did not survive is scored again by the next one, up to three times; other calls fail with
    ``PLUGIN_EXITED`` or ``ENVIRONMENT_EXITED``. With an ``address`` no process is started, and the
    connection is made again.
    """

    def __init__(self, manifest: Manifest, *, args: str = "", verify: Verify = unpinned) -> None:
        """args: of an environment, a JSON object. verify: called before each start; raises if a
        file of the plugin has changed."""
        self.manifest = manifest
        self.broken = True
        self.starts = 0
        self._args, self._verify = args, verify
        self._process: subprocess.Popen[bytes] | None = None
        self._sidecar: Sidecar | None = None
        self._folder = ""
        self._starting = asyncio.Lock()
        self._failures = 0  # starts since the last call that succeeded
        self._not_before = 0.0
        self._open = 0
        self._timeouts = 0
        self._looked = 0.0
        self._draining = False
        self._drained = asyncio.Event()
        self._condition: Condition | None = None
        self._ended = False
        self._reaping: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def pid(self) -> int:
        """The process id; 0 without a process."""
        return self._process.pid if self._process is not None and self._process.poll() is None else 0

    @property
    def condition(self) -> Condition | None:
        """What is wrong now, or was in the last minute; None if nothing is."""
        found = self._condition
        if found is not None and not self.broken and time.time() - found.since > _SHOWN_SECONDS:
            self._condition = None
            return None
        return None if found is None else replace(found, ongoing=self.broken or self._draining)

    async def start(self) -> pb.HandshakeResponse:
        """Start the program, or connect to the address, and compare the handshake with the
        manifest. After a failure it waits for the backoff. Raises ``RolloutError``."""
        async with self._starting:
            return await self._begin()

    async def call(self, method: str, request: Any, timeout: float) -> Any:
        """Call a method. Raises ``RolloutError``."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        crashes = 0
        while True:
            try:
                async with asyncio.timeout_at(end):
                    await self._ready(method)
            except TimeoutError:
                raise self._late(timeout) from None
            except wire.PluginUnavailable:  # it could not start; the next try waits for the backoff
                if method not in _PURE or loop.time() >= end:
                    raise
                continue
            try:
                return await self._once(method, request, max(0.001, end - loop.time()), timeout)
            except wire.PluginExited:
                crashes += 1
                if method not in _PURE or crashes >= _TRIES or loop.time() >= end:
                    raise

    async def close(self) -> None:
        """End the process; idempotent."""
        self._ended = True
        sidecar = self._sidecar
        self.kill()
        if sidecar is not None:
            await sidecar.close()
        await reaped(self._reaping)
        for task in list(self._tasks):
            task.cancel()

    def kill(self) -> None:
        """End the process and all processes that it started."""
        self.broken = True
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            self._reaping = reap(process, f"the sidecar `{self.name}`")
            assert process.stdin is not None
            process.stdin.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""

    async def _ready(self, method: str) -> None:
        """Wait until the process can be called."""
        if self._draining:
            await self._drained.wait()
        if self._process is not None and self._process.poll() is not None:
            self._died(self.starts, f"it ended with {_code(self._process)}")
        if not self.broken:
            return
        if wire.of_environment(method):  # its episodes are lost; the caller starts it again
            raise wire.EnvironmentExited(f"the sidecar `{self.name}` has ended", fix="see its output in the worker's log")
        async with self._starting:
            if self.broken:
                await self._begin()

    async def _begin(self) -> pb.HandshakeResponse:
        delay = self._not_before - time.monotonic()
        if delay > 0:
            await asyncio.sleep(delay)
        await self._verify()
        if self._ended:
            raise wire.PluginUnavailable(f"the sidecar `{self.name}` is closed")
        self.kill()
        self._failures += 1
        if self._failures > 1:
            self._not_before = time.monotonic() + min(_MOST_SECONDS, _FIRST_SECONDS * 2 ** min(16, self._failures - 2))
        address = self.manifest.address or self._launch()
        self._sidecar = sidecar = Sidecar(address, name=self.name, tls=self.manifest.tls)
        try:
            handshake = await self._serving(sidecar)
            self._compare(handshake)
        except BaseException:
            await sidecar.close()
            self.kill()
            raise
        self.broken, self._draining = False, False
        self._timeouts = 0
        self.starts += 1
        if self.starts > 1:
            log.warning("the sidecar `%s` was started again (start %d)", self.name, self.starts)
        return handshake

    def _launch(self) -> str:
        _sweep()
        self._folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
        if len(self._folder) > 90:  # of 107 bytes that the path of a socket may have
            os.rmdir(self._folder)
            self._folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir="/tmp")
        address = f"unix:{self._folder}/plugin.sock"
        program = self.manifest.command[0]
        self._process = subprocess.Popen(
            [sys.executable if program == "python" else program, *self.manifest.command[1:]],
            cwd=self.manifest.path.parent,
            stdin=subprocess.PIPE,  # it closes when this process ends
            stdout=2,
            start_new_session=True,  # so that processes that it starts end with it
            env={**environment(), ADDRESS_VARIABLE: address, ARGS_VARIABLE: self._args, "PYTHONUNBUFFERED": "1"},
        )
        return address

    async def _serving(self, sidecar: Sidecar) -> pb.HandshakeResponse:
        """Wait until it serves, or its process ends."""
        seconds = self.manifest.start_seconds
        starting = asyncio.ensure_future(sidecar.start(seconds))
        try:
            while not starting.done():
                await asyncio.wait([starting], timeout=0.05)
                if not starting.done() and self._process is not None and self._process.poll() is not None:
                    text = f"the sidecar `{self.name}` ended with {_code(self._process)} before it served"
                    raise wire.PluginUnavailable(text, fix="see its output above, or in the worker's log")
            return starting.result()
        finally:
            if not starting.done():
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)

    def _compare(self, handshake: pb.HandshakeResponse) -> None:
        kind = self.manifest.kind
        info = next((each for each in handshake.plugins if each.kind == KINDS[kind] and each.name == self.name), None)
        if info is None:
            names = (
                ", ".join(f"{pb.PluginKind.Name(each.kind)[12:].lower()} {each.name}" for each in handshake.plugins) or "nothing"
            )
            raise wire.PluginUnknown(
                f"the sidecar serves {names}, but no {kind} `{self.name}`", fix="correct the manifest, or the sidecar"
            )
        if info.version and info.version != self.manifest.version:
            raise wire.PluginVersion(
                f"the sidecar `{self.name}` has version {info.version}, its manifest {self.manifest.version}",
                fix="build the sidecar again, or correct `version` in the manifest",
            )

    async def _once(self, method: str, request: Any, left: float, timeout: float) -> Any:
        start, sidecar = self.starts, self._sidecar
        assert sidecar is not None
        self._open += 1
        try:
            answer = await sidecar.call(method, request, left)
        except (wire.PluginExited, wire.EnvironmentExited) as error:
            self._died(start, error.message)
            raise
        except RolloutError as error:
            if error.reason.endswith("_TIMEOUT"):
                what = f"{wire.describe(method, request)} by `{self.name}`"
                if await self._blocked(start, sidecar, what):
                    raise wire.PluginBlocked(
                        f"{what} took longer than {timeout:g} s and blocked its process, which was ended",
                        fix="let it answer health checks while it computes",
                    ) from error
                raise wire.timeout_error(method, timeout, what) from error
            self._timeouts = self._failures = 0  # it answered
            raise
        except asyncio.CancelledError:
            self._watch(start, sidecar, wire.describe(method, request))
            raise
        finally:
            self._open -= 1
            self._drain()
        if start == self.starts:
            self._timeouts = self._failures = 0
            self._look()
        return answer

    def _died(self, start: int, text: str) -> None:
        """Record that the process of a call has ended, unless another one has replaced it."""
        if start != self.starts or self.broken:
            return
        self.kill()
        self._note("PLUGIN_RESTARTING", text, "see its output in the worker's log; it starts again by itself")

    async def _blocked(self, start: int, sidecar: Sidecar, what: str) -> bool:
        """Whether the process does not answer after a call that was late; then it is ended."""
        self._timeouts += 1
        healthy = await sidecar.healthy(_HEALTH_SECONDS)
        if healthy and self._timeouts < _MOST_TIMEOUTS:
            return False
        if start == self.starts and not self.broken:
            self.kill()
            text = "did not answer health checks" if not healthy else f"missed {self._timeouts} deadlines in a row"
            self._note(
                "PLUGIN_BLOCKED", f"{what} was late, and it {text}", "make it answer while it computes, or raise its timeout"
            )
        return not healthy

    def _watch(self, start: int, sidecar: Sidecar, what: str) -> None:
        """Look in the background whether a cancelled call blocks the process."""

        async def look() -> None:
            self._timeouts -= 1  # a cancelled call does not count as late
            await self._blocked(start, sidecar, what)

        if self._ended or self.broken:
            return
        task = asyncio.create_task(look(), name="plugin")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _look(self) -> None:
        """Compare the process's memory with its limit, at most once a second."""
        now = time.monotonic()
        if self._draining or self._process is None or now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        used, limit = _memory(self._process.pid), self.manifest.memory_bytes
        if used > limit:
            self._note(
                "PLUGIN_LEAKS",
                f"it has {used / 1e6:.0f} MB of memory after {self.starts} starts; the limit is {limit / 1e6:.0f} MB",
                "correct the leak, or raise `memory_bytes` in its manifest; it is replaced when its open calls have ended",
            )
            self._draining = True
            self._drained.clear()
            self._drain()

    def _drain(self) -> None:
        """End a process that leaks when its open calls have ended."""
        if self._draining and not self._open:
            self.kill()
            self._draining = False
            self._drained.set()

    def _note(self, reason: str, text: str, fix: str) -> None:
        self._condition = Condition(reason, self.name, text, fix, time.time())
        log.warning("%s: the sidecar `%s`: %s", reason, self.name, text)

    def _late(self, timeout: float) -> RolloutError:
        why = self._condition.text if self._condition else "it has not started"
        return wire.PluginRestarting(
            f"the sidecar `{self.name}` did not start again within {timeout:g} s: {why}", fix="see its output in the worker's log"
        )


def _code(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _memory(pid: int) -> int:
    """Resident bytes of a process; 0 where /proc has none."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def _sweep() -> None:
    """Remove the sockets of workers that were killed."""
    for folder in {Path(tempfile.gettempdir()), Path("/tmp")}:
        for path in folder.glob(f"{_PREFIX}*"):
            pid, dash, _ = path.name.removeprefix(_PREFIX).partition("-")
            with contextlib.suppress(OSError, OverflowError):  # another folder may have this prefix
                if dash and pid.isdigit() and path.stat().st_uid == os.getuid() and not _alive(int(pid)):
                    shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
