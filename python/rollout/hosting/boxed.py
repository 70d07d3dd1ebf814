"""Runs plugins in a box of ``rollout-sandbox`` (docs/tools.md): code that no one trusts.

The process is that of ``child.py``, with the same frames over its standard input and output. It has
a separate uid and no network, sees the system's programs, this Python, and the files next to the
plugin, and has limits. What it sends is validated: it is untrusted input.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from google.protobuf.message import DecodeError
from google.rpc import status_pb2  # pyright: ignore[reportMissingTypeStubs]

from rollout.errors import RolloutError
from rollout.hosting import wire
from rollout.hosting.child import HEAD, START_SECONDS
from rollout.hosting.host import RESPONSES, Source
from rollout.hosting.look import Watched
from rollout.plugin import RewardError, RewardTimeout, split_plugin
from rollout.plugin.v1 import plugin_pb2 as pb
from rollout.sandbox import Bind, Limits, Process, Result, Sandbox, SandboxError, Sandboxes, Spec, python_binds

NAMES = ("memory_bytes", "pids", "cpus", "output_bytes", "disk_bytes")
"""The keys of ``[reward.limits]``."""


class RewardOutOfMemory(RewardError):
    """The sandbox of the reward reached ``memory_bytes``."""

    reason: ClassVar[str] = "REWARD_OUT_OF_MEMORY"


class RewardPidsLimit(RewardError):
    """The sandbox of the reward reached ``pids``."""

    reason: ClassVar[str] = "REWARD_PIDS_LIMIT"


class RewardDiskLimit(RewardError):
    """The sandbox of the reward reached ``disk_bytes``."""

    reason: ClassVar[str] = "REWARD_DISK_LIMIT"


class RewardOutputLimit(RewardError):
    """A call printed and returned more than ``output_bytes``."""

    reason: ClassVar[str] = "REWARD_OUTPUT_LIMIT"


class RewardKilled(RewardError):
    """The process of the reward ended during a call, and no limit explains it."""

    reason: ClassVar[str] = "REWARD_KILLED"


class RewardNoNetwork(RewardError):
    """The reward tried to reach the network, which its sandbox does not have."""

    reason: ClassVar[str] = "REWARD_NO_NETWORK"


class RewardSandboxFailed(RewardError):
    """The sandbox of the reward could not be built, or was lost."""

    reason: ClassVar[str] = "REWARD_SANDBOX"


class RewardLimitNotEnforceable(RewardError):
    """This host can't enforce a limit of ``[reward.limits]``."""

    reason: ClassVar[str] = "LIMIT_NOT_ENFORCEABLE"


_LIMITS: dict[str, tuple[type[RewardError], str]] = {
    "LIMIT_MEMORY": (RewardOutOfMemory, "memory_bytes"),
    "LIMIT_PIDS": (RewardPidsLimit, "pids"),
    "LIMIT_DISK": (RewardDiskLimit, "disk_bytes"),
    "LIMIT_OUTPUT": (RewardOutputLimit, "output_bytes"),
}
SPENT: dict[str, tuple[type[RewardError], str]] = {
    error.reason: (error, name) for error, name in (*_LIMITS.values(), (RewardNoNetwork, ""))
}
"""Errors that the process reports itself, see ``child.exhausted``, with the key of the limit."""


@dataclass(frozen=True, slots=True)
class BoxLimits:
    """Limits of one box; ``cpus`` 0 is none."""

    memory_bytes: int = 2 << 30
    pids: int = 128
    cpus: float = 0.0
    output_bytes: int = 64 << 20  # of a call: what it prints and returns
    disk_bytes: int = 128 << 20

    def spec(self, binds: Sequence[Bind]) -> Spec:
        """The box. The time and the output of a call are limited by the caller."""
        limits = Limits(
            memory_bytes=self.memory_bytes,
            pids=self.pids,
            cpus=self.cpus or None,
            disk_bytes=self.disk_bytes,
            wall_time_s=86400.0,
        )
        return Spec(binds=binds, limits=limits)


def check_host(limits: BoxLimits) -> None:
    """Raise a ``RewardError`` if this host builds no boxes, or can't enforce a limit."""
    try:
        report = Sandbox.probe()
    except (SandboxError, OSError) as error:
        raise _refused(error) from error
    if report.error is not None:
        raise _refused(report.error)
    for name in NAMES:
        if report.by(name) == "none" and (name != "cpus" or limits.cpus):
            found = next(each for each in report.limits if each.name == name)
            raise RewardLimitNotEnforceable(
                f"`reward.limits.{name}` can't be enforced on this host: {found.why}",
                fix=f"{found.fix}; or remove `{name}`" if name == "cpus" else found.fix,
            )


def _refused(error: Exception) -> RewardSandboxFailed:
    message, fix = (error.message, error.fix) if isinstance(error, SandboxError) else (str(error), "")
    return RewardSandboxFailed(f"`reward.sandbox` needs boxes, which this host does not build: {message}", fix=fix)


def binds_of(plugin: str, base_dir: str) -> list[Bind]:
    """What the box of a plugin shows, read-only: this Python with its import path, and what is next
    to the plugin's file, except names that begin with a dot."""
    shown = python_binds()
    folder = Path(os.path.abspath(os.path.join(base_dir, split_plugin(plugin)[0]))).parent
    paths = [Path(os.path.abspath(entry)) for entry in sys.path if _imported_from(entry)]
    paths += [path for path in sorted(folder.iterdir()) if not path.name.startswith(".") and path.exists()]
    for path in dict.fromkeys(paths):
        if path.is_relative_to("/usr") or any(path.is_relative_to(bind.source) for bind in shown):
            continue
        shown = [bind for bind in shown if not Path(bind.source).is_relative_to(path)]
        shown.append(Bind(str(path)))
    return shown


def _imported_from(entry: str) -> bool:
    """Whether a box needs a folder of the import path: not the working directory, which `-m`
    adds."""
    if not entry or not os.path.exists(entry):
        return False
    own = os.path.join(entry, "rollout", "hosting")
    return os.path.abspath(entry) != os.getcwd() or entry in os.environ.get("PYTHONPATH", "").split(":") or os.path.isdir(own)


@dataclass(slots=True)
class _Call:
    """A call in progress, and what its process sent since it began."""

    number: int
    left: int  # bytes that it may still send
    printed: bytearray = field(default_factory=bytearray)


class BoxedProcess:
    """A :class:`~rollout.hosting.runner.Runner` whose process is in a box.

    It answers one call at a time; others wait. After a timeout, a limit, or a crash the box is
    closed and ``broken``, and the next call opens another, so no process of a failed call is left.
    """

    def __init__(self, server: Sandboxes, plugin: str, base_dir: str, limits: BoxLimits) -> None:
        """server: builds the boxes; started by the caller."""
        self._server, self._limits = server, limits
        self._source: Source = {"plugin": plugin, "base_dir": base_dir}
        self._box: Sandbox | None = None
        self._process: Process | None = None
        self._numbers = itertools.count()
        self._received = bytearray()  # what may be part of an answer
        self._turn = asyncio.Lock()
        self._watched = Watched(lambda: 0, self._stack)
        self._sent = False  # whether the request of the call in progress is sent as a whole
        self._stacks: dict[int, asyncio.Future[bytes]] = {}  # by the number of each `Stack`
        self.broken = False

    async def start(self) -> pb.HandshakeResponse:
        binds = binds_of(self._source["plugin"], self._source["base_dir"])
        box = self._server.open(self._limits.spec(binds))
        self._received = bytearray()
        try:
            await box.__aenter__()
            self._box = box
            self._process = await box.start([sys.executable, "-m", "rollout.hosting.child"], env=box_environment())
            await self._exchange("Load", json.dumps([dict(self._source)]).encode(), START_SECONDS, "importing the plugin")
            handshake = pb.HandshakeRequest(schema_version=wire.SCHEMA_VERSION)
            answer = await self._exchange("Handshake", handshake.SerializeToString(), 10.0, "the plugin's Handshake")
        except SandboxError as error:
            await self.close()
            raise RewardSandboxFailed(f"the sandbox of the reward: {error.message}", fix=error.fix) from error
        except BaseException:
            await self.close()
            raise
        self.broken = False
        return pb.HandshakeResponse.FromString(answer)

    async def call(self, method: str, request: Any, timeout: float) -> Any:
        async with self._turn:
            if self.broken:
                await self.start()
            try:
                body = await self._exchange(method, request.SerializeToString(), timeout, wire.describe(method, request))
                return RESPONSES[method].FromString(body)
            except RolloutError as error:
                if error.reason in SPENT:  # its processes and files would fail the next call, too
                    await self.close()
                if isinstance(error, SandboxError):
                    raise RewardSandboxFailed(f"the sandbox of the reward: {error.message}", fix=error.fix) from error
                raise
            except DecodeError as error:
                await self.close()
                raise RewardKilled(f"the answer of the reward can't be read: {error}", fix=_FORGED) from error

    async def close(self) -> None:
        self.broken = True
        box, self._box, self._process = self._box, None, None
        if box is not None:
            with contextlib.suppress(SandboxError):  # it is gone already
                await asyncio.shield(box.__aexit__())

    async def _exchange(self, method: str, message: bytes, timeout: float, what: str) -> bytes:
        """Send a request and return its answer. Raises ``RolloutError``; then, unless the plugin
        raised it, the box is closed."""
        process = self._process
        assert process is not None
        call = _Call(next(self._numbers), self._limits.output_bytes)
        body = method.encode() + b"\0" + message
        self._watched.open[call.number] = (method, time.monotonic())
        try:
            async with asyncio.timeout(timeout):
                sending = asyncio.create_task(process.write(HEAD.pack(len(body), call.number) + body))
                sending.add_done_callback(self._is_sent)
                try:
                    answer = await self._answer(process, call, what)
                finally:
                    sending.cancel()
                    await asyncio.gather(sending, return_exceptions=True)
        except TimeoutError:
            await self.close()
            raise wire.timeout_error(method, timeout, what) from None
        except BaseException:
            await self.close()
            raise
        finally:
            self._sent = False
            self._watched.open.pop(call.number, None)
        if call.printed:
            sys.stderr.write(call.printed.decode(errors="replace"))
        if answer[0]:
            raise reported(wire.error_of(status_pb2.Status.FromString(answer[1:])))
        return answer[1:]

    def _is_sent(self, sending: asyncio.Task[None]) -> None:
        self._sent = not sending.cancelled() and sending.exception() is None

    async def _stack(self) -> bytes:
        """The answer to ``Stack``. Raises ``OSError``."""
        process, number = self._process, next(self._numbers)
        if process is None or not self._sent:
            raise OSError("no call is in progress")
        answered = self._stacks[number] = asyncio.get_running_loop().create_future()
        try:
            await process.write(HEAD.pack(len(b"Stack"), number) + b"Stack")
            return (await answered)[1:]
        except SandboxError as error:
            raise OSError(str(error)) from error
        finally:
            del self._stacks[number]

    async def _answer(self, process: Process, call: _Call, what: str) -> bytes:
        """Read until the answer of a call is complete. Answers of other calls, and output, are
        counted and skipped."""
        received = self._received
        while True:
            while len(received) >= HEAD.size:
                size, number = HEAD.unpack_from(received)
                if size < 1 or size > self._limits.output_bytes:
                    raise RewardKilled(f"{what} wrote to the connection of its process", fix=_FORGED)
                if len(received) < HEAD.size + size:
                    break
                body = bytes(received[HEAD.size : HEAD.size + size])
                del received[: HEAD.size + size]
                if number == call.number:
                    return body
                if (stack := self._stacks.get(number)) is not None and not stack.done():
                    stack.set_result(body)
            event = await process.read()
            if event is None:
                raise ended(await process.wait(), self._limits, what, bytes(call.printed))
            stream, data = event
            call.left -= len(data)
            if call.left < 0:
                raise RewardOutputLimit(
                    f"{what} printed and returned more than {self._limits.output_bytes} bytes",
                    fix="print less, or raise `reward.limits.output_bytes`",
                )
            if stream == "stderr":
                call.printed = (call.printed + data)[-_SHOWN:]
                continue
            received += data


def ended(end: Result, limits: BoxLimits, what: str, printed: bytes) -> RewardError:
    """The error of a call whose process has ended. what: the call. printed: what it wrote last."""
    for reason in (end.reason, *end.limits_hit):
        if reason == "LIMIT_WALL_TIME":
            return RewardTimeout(
                f"{what} took longer than its time limit", fix="make it faster or raise `reward.timeout_seconds`"
            )
        if reason in _LIMITS:
            error, name = _LIMITS[reason]
            text = f"{what} reached the limit of its sandbox, {name} = {getattr(limits, name)}"
            return error(text, fix=f"raise `reward.limits.{name}`")
    how = end.signal or f"exit code {end.exit_code}"
    tail = printed.decode(errors="replace").strip().rpartition("\n")[2][-300:]
    return RewardKilled(
        f"{what} ended its process ({how})" + (f"; its last output: {tail}" if tail else ""), fix="see the worker's log"
    )


def reported(error: RolloutError) -> RolloutError:
    """The error of a plugin; with what to change if its sandbox lacks something."""
    kind, key = SPENT.get(error.reason, (None, ""))
    if kind is None:
        return error
    return kind(f"{error.message}, in its sandbox", fix=f"raise `reward.limits.{key}`" if key else _NETWORK, place=error.place)


def box_environment() -> dict[str, str]:
    """The variables of this process that the Python in a box needs. No other is passed on."""
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "PYTHONHASHSEED") if name in os.environ}
    return {**kept, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}


_NETWORK = "the sandbox has no network: write `sandbox = false` for a reward that asks an endpoint, or score without it"

_SHOWN = 64 << 10  # bytes of the output of a call that are logged
_FORGED = "the reward, or a process that it started, wrote to a file that it did not open: correct it"
