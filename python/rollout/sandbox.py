"""Runs commands in boxes that contain them: the client of ``rollout-sandbox``.

    async with Sandbox(Spec(limits=Limits(memory_bytes=256 << 20))) as box:
        result = await box.run(["python3", "-c", "print(6 * 7)"])
        assert result.ok and result.stdout == b"42\\n"

A box keeps its files between commands, until :meth:`Sandbox.reset` or the end of the block. For
many boxes share one :class:`Sandboxes`, which keeps some of them warm. docs/tools.md documents the
limits and the reasons.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from rollout.errors import RolloutError

Reason = Literal[
    "EXITED", "SIGNALED", "DENIED", "KILLED",
    "LIMIT_WALL_TIME", "LIMIT_MEMORY", "LIMIT_PIDS", "LIMIT_OUTPUT", "LIMIT_DISK",
]  # fmt: skip
"""How a command ended. docs/tools.md explains each."""


class SandboxError(RolloutError):
    """The sandbox refused or failed, for ``reason``. A failed command is a :class:`Result`."""

    reason: ClassVar[str] = "SANDBOX"

    def __init__(self, reason: str, message: str, *, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.reason = reason  # type: ignore[misc]  # of this error, not of the class


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a box. None is the default of ``rollout-sandbox``; ``cpus`` has no default
    limit."""

    wall_time_s: float | None = None  # of each command
    memory_bytes: int | None = None  # of all processes together, files in the box included
    pids: int | None = None  # processes and threads
    cpus: float | None = None  # CPU seconds per second
    output_bytes: int | None = None  # of each command, stdout and stderr together
    disk_bytes: int | None = None  # of /home/sandbox, /tmp, and /dev/shm together
    open_files: int | None = None  # of each process


@dataclass(frozen=True, slots=True)
class Bind:
    """A file or a folder of the host that the box shows."""

    source: str
    target: str = ""  # the source if empty
    writable: bool = False


@dataclass(frozen=True, slots=True)
class Spec:
    """Describes a box."""

    binds: Sequence[Bind] = ()
    network: Literal["none", "host"] = "none"
    limits: Limits = Limits()
    best_effort: Sequence[str] = ()  # limits that may be unenforced: memory_bytes, pids, cpus

    def wire(self) -> dict[str, Any]:
        limits = {name: value for name in Limits.__slots__ if (value := getattr(self.limits, name)) is not None}
        binds = [{"source": b.source, "target": b.target, "writable": b.writable} for b in self.binds]
        return {"binds": binds, "network": self.network, "limits": limits, "best_effort": list(self.best_effort)}


def python_binds(prefix: str = sys.prefix) -> list[Bind]:
    """The binds that a box needs to run the Python of an environment, by default this one."""
    wanted = [Path(os.path.abspath(prefix))]
    config = wanted[0] / "pyvenv.cfg"
    if config.exists():
        executable = (wanted[0] / "bin" / "python").resolve()
        wanted.append(executable.parent.parent)
    return [Bind(str(path)) for path in dict.fromkeys(wanted) if path not in (Path("/usr"), Path("/"))]


@dataclass(frozen=True, slots=True)
class Result:
    """The end of a command."""

    reason: Reason
    exit_code: int  # -1 if a signal ended the command
    stdout: bytes
    stderr: bytes
    signal: str = ""
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    limits_hit: tuple[str, ...] = ()  # every limit reached, also if the command succeeded
    denied: dict[str, int] = field(default_factory=dict[str, int])  # calls that returned EPERM, by system call
    wall_time_s: float = 0.0
    cpu_time_s: float = 0.0
    memory_peak_bytes: int = 0
    start_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the command exited with code 0 within its limits."""
        return self.reason == "EXITED" and self.exit_code == 0

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        values = dict(raw)
        values["stdout"], values["stderr"] = _bytes(raw["stdout"]), _bytes(raw["stderr"])
        values["limits_hit"] = tuple(raw.get("limits_hit", ()))
        values["denied"] = {one["syscall"]: one["count"] for one in raw.get("denied", ())}
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Enforcement:
    """How this host enforces one limit or boundary. ``by`` is ``none`` if it does not."""

    name: str
    by: str
    why: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What this host can do."""

    ok: bool
    kernel: str
    root: bool
    limits: tuple[Enforcement, ...]
    boundaries: tuple[Enforcement, ...]
    error: SandboxError | None = None

    def by(self, name: str) -> str:
        """How a limit or a boundary is enforced, ``none`` if it is not."""
        return next((e.by for e in (*self.limits, *self.boundaries) if e.name == name), "none")

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        error = raw.get("error")
        return cls(
            ok=raw["ok"],
            kernel=raw["kernel"],
            root=raw["root"],
            limits=tuple(Enforcement(**e) for e in raw["limits"] or ()),
            boundaries=tuple(Enforcement(**e) for e in raw["boundaries"] or ()),
            error=_error(error) if error else None,
        )


def find_binary() -> str:
    """The program: ``$ROLLOUT_SANDBOX``, next to this Python environment, or on ``PATH``."""
    if named := os.environ.get("ROLLOUT_SANDBOX"):
        return named
    for folder in (Path(sys.prefix) / "bin", Path(sys.prefix).parent / "bin"):
        if os.access(folder / "rollout-sandbox", os.X_OK):
            return str(folder / "rollout-sandbox")
    if found := shutil.which("rollout-sandbox"):
        return found
    raise SandboxError(
        "COMMAND_NOT_FOUND",
        "the program rollout-sandbox is not installed",
        fix="run `make build` and add bin/ to PATH, or set ROLLOUT_SANDBOX to its path",
    )


class Process:
    """A command that runs while its input and output are used. Iterate over its output:

    async for stream, data in process: ...

    Output waits here until it is read. A command is killed, with the reason ``LIMIT_OUTPUT``, when
    more than ``unread_bytes`` wait.
    """

    unread_bytes: ClassVar[int] = 16 << 20
    _event_bytes: ClassVar[int] = 128  # of memory that each event takes besides its data

    def __init__(self, server: Sandboxes, name: str) -> None:
        self._server, self._name = server, name
        self._events: asyncio.Queue[tuple[Literal["stdout", "stderr"], bytes] | Result | SandboxError] = asyncio.Queue()
        self._unread, self._overflowed = 0, False
        self.attached = self.ended = False  # it has a reader; its end was delivered
        self._end: Result | SandboxError | None = None

    async def write(self, data: bytes, *, eof: bool = False) -> None:
        """Write to the standard input; ``eof`` closes it. Waits while the pipe is full."""
        await self._server.call("write", process=self._name, data=_data(data), eof=eof)

    async def kill(self) -> None:
        """Kill the command and everything it started."""
        if self._end is None:
            await self._server.call("kill", process=self._name)

    async def __aiter__(self) -> AsyncIterator[tuple[Literal["stdout", "stderr"], bytes]]:
        while (event := await self.read()) is not None:
            yield event

    async def read(self) -> tuple[Literal["stdout", "stderr"], bytes] | None:
        """The next output, with the stream it is from; None at the end."""
        if self._end is not None:
            return None
        event = await self._events.get()
        if isinstance(event, tuple):
            self._unread -= len(event[1]) + self._event_bytes
            return event
        self._end = event
        return None

    async def wait(self) -> Result:
        """Discard the remaining output and return the end."""
        while await self.read() is not None:
            pass
        if isinstance(self._end, SandboxError):
            raise self._end
        assert self._end is not None
        return self._end

    def deliver(self, event: Mapping[str, Any]) -> bool:
        """Queue an event of the server. False asks it to kill the command."""
        if "stream" in event:
            data = _bytes(event["data"])
            if self._overflowed:
                return True
            self._unread += len(data) + self._event_bytes
            if self._unread > self.unread_bytes:
                self._overflowed = True
                return False
            self._events.put_nowait((event["stream"], data))
            return True
        end = Result.parse(event["result"]) if "result" in event else _error(event["error"])
        if self._overflowed and isinstance(end, Result):
            end = replace(end, reason="LIMIT_OUTPUT", limits_hit=tuple(dict.fromkeys((*end.limits_hit, "LIMIT_OUTPUT"))))
        self.ended = True
        self._events.put_nowait(end)
        return True


class Sandboxes:
    """A ``rollout-sandbox serve`` process, one per worker: boxes are built and kept warm by it.

    If the process ends, its calls fail with BOX_LOST, and the next ``open``, ``run``, or ``warm``
    starts another one, which keeps the same boxes warm.
    """

    def __init__(self, binary: str | None = None) -> None:
        self._binary = binary
        self.starts = 0
        """How often the process was started: a box of an earlier one is lost."""
        self._warm: dict[str, dict[str, Any]] = {}  # the last request of each spec
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._sequence = 0
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._streams: dict[str, Process] = {}

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def _start(self) -> None:
        binary = self._binary or find_binary()
        self._process = await asyncio.create_subprocess_exec(
            binary, "serve", stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdout is not None
        self._streams = {}
        self._reader = asyncio.create_task(self._read(self._process.stdout))
        self.starts += 1

    async def __aexit__(self, *_: object) -> None:
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        await process.wait()
        if self._reader is not None:
            await self._reader

    @property
    def pid(self) -> int:
        """The process id of the server; 0 outside of ``async with``."""
        return self._process.pid if self._process is not None else 0

    async def warm(self, spec: Spec, count: int, prestart: Sequence[str] | None = None, **command: Any) -> None:
        """Keep boxes of a spec ready, each with a command that already runs if ``prestart`` names
        one. Returns when they are ready; 0 drops them."""
        params: dict[str, Any] = {"spec": spec.wire(), "count": count}
        if prestart is not None:
            params["prestart"] = _command(prestart, **command)
        await self.call("warm", **params)
        self._warm[json.dumps(params["spec"])] = params

    async def run(self, spec: Spec, argv: Sequence[str], **command: Any) -> Result:
        """Run one command in a new box. See :meth:`Sandbox.run` for the arguments."""
        return Result.parse(await self.call("run", **spec.wire(), **_command(argv, **command)))

    def open(self, spec: Spec) -> Sandbox:
        """A box of this server; use it with ``async with``."""
        return Sandbox(spec, server=self)

    def attach(self, name: str) -> Process:
        """The stream of a process that the server has named. The caller keeps it: it is forgotten
        here when its command has ended."""
        stream = self._streams.setdefault(name, Process(self, name))
        stream.attached = True
        if stream.ended:
            del self._streams[name]
        return stream

    async def call(self, method: str, **params: Any) -> Any:
        """One request of the protocol. A canceled call kills its command."""
        if self._process is None:
            raise SandboxError("BOX_LOST", "rollout-sandbox does not run", fix="use it inside `async with`")
        async with self._starting:
            if self._ended() and method in ("open", "run", "warm"):
                await self._start()
                for warm in self._warm.values():
                    await self._exchange("warm", warm)
        return await self._exchange(method, params)

    def _ended(self) -> bool:
        return self._process is None or self._process.returncode is not None or self._reader is None or self._reader.done()

    async def _exchange(self, method: str, params: dict[str, Any]) -> Any:
        process = self._process
        if process is None or process.stdin is None or self._ended():
            raise SandboxError("BOX_LOST", "rollout-sandbox ended", fix="see its standard error")
        self._sequence += 1
        number = self._sequence
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        self._send({"id": number, "method": method, "params": params})
        try:
            await process.stdin.drain()
            return await future
        except asyncio.CancelledError:
            self._send({"id": 0, "method": "cancel", "params": {"request": number}})
            raise
        except ConnectionError as error:
            raise SandboxError("BOX_LOST", f"rollout-sandbox ended: {error}", fix="see its standard error") from error
        finally:
            self._calls.pop(number, None)

    def _send(self, request: dict[str, Any]) -> None:
        body = json.dumps(request).encode()
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(len(body).to_bytes(4, "big") + body)

    async def _read(self, stdout: asyncio.StreamReader) -> None:
        try:
            while True:
                size = int.from_bytes(await stdout.readexactly(4), "big")
                self._dispatch(json.loads(await stdout.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            lost = {"reason": "BOX_LOST", "message": "rollout-sandbox ended", "fix": "see its standard error"}
            for future in self._calls.values():
                if not future.done():
                    future.set_exception(_error(lost))
            for stream in self._streams.values():
                stream.deliver({"error": lost})

    def _dispatch(self, response: dict[str, Any]) -> None:
        if (event := response.get("event")) is not None:
            name = event["process"]
            stream = self._streams.setdefault(name, Process(self, name))
            if not stream.deliver(event):
                self._send({"id": 0, "method": "kill", "params": {"process": name}})
            if stream.ended and stream.attached:
                del self._streams[name]
            return
        future = self._calls.get(response.get("id", 0))
        if future is None or future.done():
            return
        if (error := response.get("error")) is not None:
            future.set_exception(_error(error))
        else:
            future.set_result(response.get("result"))


class Sandbox:
    """A box: ``async with Sandbox(spec) as box``. Its files are kept until the end of the block."""

    def __init__(self, spec: Spec | None = None, *, server: Sandboxes | None = None) -> None:
        self._spec = spec or Spec()
        self._server = server or Sandboxes()
        self._own = server is None
        self._box: str | None = None
        self._start = 0  # of the server's process that has the box
        self.prestarted: Process | None = None
        """The command of :meth:`Sandboxes.warm` that runs in this box already."""

    @staticmethod
    def probe(binary: str | None = None) -> Report:
        """How this host enforces each limit and boundary."""
        out = subprocess.run([binary or find_binary(), "probe", "--format", "json"], capture_output=True, check=False)
        try:
            return Report.parse(json.loads(out.stdout))
        except (ValueError, KeyError) as error:
            message = f"rollout-sandbox probe failed with code {out.returncode}: {out.stderr.decode(errors='replace')}"
            raise SandboxError("ISOLATION_UNAVAILABLE", message, fix="build it again with `make build`") from error

    async def __aenter__(self) -> Self:
        if self._own:
            await self._server.__aenter__()
        try:
            self._opened(await self._server.call("open", spec=self._spec.wire()))
        except BaseException:
            if self._own:
                await self._server.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._own:
            await self._server.__aexit__()
        elif self._box is not None and self._start == self._server.starts:
            await self._server.call("close", box=self._box)
        self._box = None

    def _opened(self, answer: dict[str, Any]) -> None:
        self._box, self._start = answer["box"], self._server.starts
        self.prestarted = self._server.attach(answer["process"]) if "process" in answer else None

    async def run(self, argv: Sequence[str], **command: Any) -> Result:
        """Run a command to its end.

        stdin: bytes. env: variables in addition to PATH, HOME, TMPDIR, LANG, USER. cwd: default
        ``/home/sandbox``. files: contents by path, written before. wall_time_s, output_bytes:
        instead of the box's. keep_background: keep processes that the command leaves running.
        """
        return Result.parse(await self._call("exec", command=_command(argv, **command)))

    async def start(self, argv: Sequence[str], **command: Any) -> Process:
        """Start a command and use its input and output while it runs; arguments as in :meth:`run`.
        Without ``wall_time_s`` it may run as long as the box."""
        answer = await self._call("start", command=_command(argv, **command))
        return self._server.attach(answer["process"])

    async def reset(self) -> None:
        """Replace the box by a new one: no file and no process is left."""
        self._opened(await self._call("reset"))

    async def _call(self, method: str, **params: Any) -> Any:
        """A call of this box, and not of one with its name in a later process of the server."""
        if self._box is not None and self._start != self._server.starts:
            raise SandboxError("BOX_LOST", "the box ended with its rollout-sandbox", fix="open another one")
        return await self._server.call(method, box=self._box, **params)


def _command(
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    cwd: str = "",
    files: Mapping[str, bytes] | None = None,
    wall_time_s: float = 0,
    output_bytes: int = 0,
    keep_background: bool = False,
) -> dict[str, Any]:
    return {
        "argv": list(argv),
        "stdin": _data(stdin),
        "env": dict(env or {}),
        "cwd": cwd,
        "files": [{"path": path, "content": _data(content)} for path, content in (files or {}).items()],
        "wall_time_s": wall_time_s,
        "output_bytes": output_bytes,
        "keep_background": keep_background,
    }


def _data(data: bytes) -> Any:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def _bytes(raw: Any) -> bytes:
    return raw.encode() if isinstance(raw, str) else base64.b64decode(raw["base64"])


def _error(raw: Mapping[str, str]) -> SandboxError:
    return SandboxError(raw["reason"], raw["message"], fix=raw.get("fix", ""))
