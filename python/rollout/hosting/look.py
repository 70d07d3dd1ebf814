"""What a process of plugins does now: the line of the user's code, and what the kernel says that it
waits for. Nothing is recorded before someone asks.

The process answers the request ``Stack`` from a separate thread, also while the user's code
blocks. Code that holds the interpreter, such as a regular expression, lets no thread run; then a
signal makes faulthandler write the lines into a file in memory, ``_FILE``.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import faulthandler
import fcntl
import itertools
import json
import os
import platform
import re
import signal
import socket
import stat
import sys
import sysconfig
import threading
import time
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, cast

from rollout.waiting import why

_FILE = "rollout-stacks"
_ANSWER_SECONDS = 0.4
_SIGNAL_SECONDS = 0.2
_BUSY_SECONDS = 0.1
_LONGEST = 500  # characters of a text of a process
_MOST_LOOKS = 8
_MOST = 3  # addresses in a sentence
_MOST_POLLED = 64  # descriptors
_NAME_SERVER = ":53"  # how its address ends
_SOURCE_CHARACTERS = 80  # of a line
_SOURCE_BYTES = 1 << 20  # that are read of a file
_DEEPEST = 3  # processes that wait for each other
_KERNEL_SECONDS = 2.0  # of which _BUSY_SECONDS measure
BLOCKED = "is blocked in the kernel"
"""How the text begins of a wait that no signal ends."""
_LIBRARIES = tuple(
    {*(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))}
)
_OURS = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep


class At(NamedTuple):
    """A line of the user's code. inner: names of the library files that it has called, for example
    ``socket.py``. does, fix: what the library says that it waits for (``rollout.waiting``); file is
    empty if only this is known. thread: that executes it, as the kernel numbers it; 0: the main
    thread. process: that should answer; 0 if that is not known. calls: the innermost function of a
    library that it has called. source: the text of the line; empty if it can't be read. context:
    for people, the exception that it handles and the loop in which it sleeps; empty without
    them."""

    file: str
    line: int
    function: str
    inner: tuple[str, ...] = ()
    does: str = ""
    fix: str = ""
    thread: int = 0
    process: int = 0
    calls: str = ""
    source: str = ""
    context: str = ""

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} ({self.function})"


@dataclass(frozen=True, slots=True)
class Look:
    """What one process does. method: of the oldest call that has no answer. at: None if the line is
    not known. does: for people, what it waits for, such as ``waits for a lock``; empty if that is
    not known. fix: what ends the wait; empty if nothing special does."""

    pid: int
    method: str
    at: At | None
    does: str
    fix: str


# ---- in the process ----------------------------------------------------------------------------


def prepare() -> None:
    """Let faulthandler write the lines of this process when it gets the signal."""
    if sys.platform != "linux":
        return
    try:
        file = os.memfd_create(_FILE)
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
        faulthandler.register(_signal(), file=file, all_threads=True)
    except (OSError, ValueError):  # files are not allowed
        return


def _signal() -> int:
    return signal.SIGRTMAX - 3 if sys.platform == "linux" else 0


def here(loop: asyncio.AbstractEventLoop) -> bytes:
    """The lines of the user's code in this process as JSON, the most frequent first. loop: that of
    the calls. May be called by any thread."""
    own, main = threading.get_ident(), threading.main_thread().ident
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    handled = sys._current_exceptions()  # pyright: ignore[reportPrivateUsage]
    blocked = [_of_thread(frames[main], handled.get(main))] if main in frames else []
    found: list[At | None] = [at for at in blocked if at is not None]
    if not found:
        with contextlib.suppress(RuntimeError):  # the tasks change while they are read
            found.extend(_of_task(task) for task in list(asyncio.all_tasks(loop)))
    seen = [at for at in found if at is not None]
    threaded = any(name in _THREADS for name in seen[0].inner) if seen else True
    if not threaded and not any(blocked):
        with contextlib.suppress(RuntimeError):
            threaded = any(_awaits_thread(task) for task in list(asyncio.all_tasks(loop)))
    if not seen or (not seen[0].does and threaded):  # it waits for another thread
        native = {thread.ident: thread.native_id or 0 for thread in threading.enumerate()}
        others = [
            (native.get(ident, 0), _of_thread(f, handled.get(ident))) for ident, f in frames.items() if ident not in (own, main)
        ]
        working = [at._replace(thread=thread) for thread, at in others if at is not None]
        workers = [f for ident, f in frames.items() if ident not in (own, main) and _executes(f)]
        if working and workers and all(_awaits_result(f) for f in workers):
            working = [
                at._replace(does=_STARVED.format(len(workers)), fix=_UNSTARVED) if "_base.py" in at.inner else at
                for at in working
            ]
        seen = working or seen
    counted = Counter(at._replace(thread=0) for at in seen)
    common = [next(at for at in seen if at._replace(thread=0) == each) for each, _ in counted.most_common()]
    return json.dumps([[*_with_source(at, os.getpid())] for at in common]).encode()


_THREADS = {"_base.py", "thread.py", "threads.py", "threading.py", "queue.py"}
"""Library files in which a thread or a task waits for another thread."""


_STARVED = "waits for the result of a future, as all {} threads of executors do: work that is queued behind them never begins"
_UNSTARVED = "submit nested work to another executor, or raise `max_workers`"


def _executes(frame: FrameType | None) -> bool:
    """Whether a thread of an executor is at work."""
    files = [line.file for line in _called(frame)]
    return len(files) > 3 and any(file.endswith("concurrent/futures/thread.py") for file in files[1:])


def _awaits_result(frame: FrameType | None) -> bool:
    return any(line.function == "result" and line.file.endswith("concurrent/futures/_base.py") for line in _called(frame))


def _awaits_thread(task: asyncio.Task[Any]) -> bool:
    """Whether a task awaits a future of another thread, as of ``run_in_executor``."""
    waiter = getattr(task, "_fut_waiter", None)
    futures = [waiter, *getattr(waiter, "_children", ())]  # of asyncio.gather
    callbacks = [callback for future in futures for callback, _ in getattr(future, "_callbacks", None) or ()]
    return any("_chain_future" in getattr(callback, "__qualname__", "") for callback in callbacks)


class _Line(NamedTuple):
    file: str
    line: int
    function: str


def _called(frame: FrameType | None) -> Iterator[_Line]:
    """The lines of a thread, the innermost first."""
    while frame is not None:
        yield _Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back


def _awaited(task: asyncio.Task[Any]) -> list[_Line]:
    """The lines of a task that is suspended, the innermost first."""
    lines: list[_Line] = []
    waits: Any = task.get_coro()
    while waits is not None:
        frame = next((f for name in ("cr_frame", "gi_frame", "ag_frame") if (f := getattr(waits, name, None)) is not None), None)
        if frame is not None:
            lines.append(_Line(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        waits = next(
            (w for name in ("cr_await", "gi_yieldfrom", "ag_await") if (w := getattr(waits, name, None)) is not None), None
        )
    return lines[::-1]


_HANDLES = "while it handles "


def _of_thread(frame: FrameType, handled: object) -> At | None:
    """handled: the exception that the thread handles; a tuple in Python 3.11."""
    at = _user_line(_called(frame))
    error = cast(tuple[object, ...], handled)[1] if isinstance(handled, tuple) else handled
    if at is not None and isinstance(error, BaseException):
        with contextlib.suppress(Exception):  # the text is made by the user's code
            url = getattr(error, "url", None) or getattr(getattr(error, "request", None), "url", "")  # of HTTP clients
            named = _shown(f"{type(error).__name__}: {error}") + (f" from {_shown(str(url))}" if url else "")
            at = at._replace(context=f"{_HANDLES}{named}")
    if at is None or "pool.py" not in at.inner or (pool := _pool(frame)) is None:
        return at
    does = f"waits for the results of a multiprocessing pool of {len(pool._pool)} processes"
    if not _replaced(pool):
        return at._replace(does=does)
    return at._replace(
        does=f"{does}, one of which has ended and was replaced: the results of its tasks never arrive",
        fix="see why it ended (`dmesg` names processes that were killed for memory); "
        "concurrent.futures.ProcessPoolExecutor raises BrokenProcessPool instead",
    )


def _pool(frame: FrameType | None) -> Any:
    """The ``multiprocessing.Pool`` whose results a thread waits for; None without one."""
    while frame is not None and not frame.f_code.co_filename.endswith("multiprocessing/pool.py"):
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename.endswith("multiprocessing/pool.py"):
        found = getattr(frame.f_locals.get("self"), "_pool", None)  # of a result, not of the pool
        if hasattr(found, "_processes"):
            return found
        frame = frame.f_back
    return None


def _replaced(pool: Any) -> bool:
    """Whether a process of a pool has ended that should not: another one was started after the
    thread that replaces them, which the pool starts once it has all."""
    if pool._maxtasksperchild is not None:
        return False
    try:
        pool_began = _ticks(f"self/task/{pool._worker_handler.native_id}")
        return any(_ticks(str(process.pid)) > pool_began for process in list(pool._pool))
    except (OSError, ValueError, IndexError):
        return False


def _ticks(process: str) -> int:
    """The start of a process or of a thread, in clock ticks since the machine's start."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()[19])


def _of_task(task: asyncio.Task[Any]) -> At | None:
    at, reason = _user_line(_awaited(task)), why(task)
    if reason is None:
        return at
    return (at or At("", 0, ""))._replace(does=reason.text, fix=reason.fix, process=reason.process)


def _user_line(lines: Iterable[_Line]) -> At | None:
    """The innermost line that is in no library."""
    inner: list[str] = []
    calls = ""
    for line in lines:
        if _is_user(line.file):
            return At(line.file, line.line, line.function, tuple(inner), calls=calls)
        inner.append(os.path.basename(line.file))
        calls = calls or line.function
    return None


def _with_source(at: At, pid: int) -> At:
    """The line with its text, if the file is as it was when its process began."""
    with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
        if not at.file.startswith("/") or _mount(pid, at.file)[1] not in _LOCAL:  # reading others may never end
            return at
        with open(os.open(at.file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode) or info.st_mtime > _began(pid) + 1:
                return at
            text = file.read(_SOURCE_BYTES).decode(errors="replace")
        at = at._replace(source=_shown(text.split("\n")[at.line - 1 :][0]))
        if "sleep" in at.source and (loop := _loop(text, at.line)):
            at = at._replace(context=", ".join(filter(None, (f"in the loop `{loop}`", at.context))))
    return at


def _loop(text: str, line: int) -> str:
    """The first line of the innermost ``while`` loop around a line, if it has a condition."""
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        loops = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.While)]
        around = [
            node for node in loops if node.lineno < line <= (node.end_lineno or 0) and not isinstance(node.test, ast.Constant)
        ]
        if around:
            return _shown(f"while {ast.unparse(max(around, key=lambda node: node.lineno).test)}:")
    return ""


def _shown(source: str) -> str:
    """A line of code for a sentence."""
    text = " ".join(source.split())[:_SOURCE_CHARACTERS]
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text).strip()


def _began(pid: int) -> float:
    """When a process began, in seconds since 1970."""
    up = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - up + _ticks(str(pid)) / os.sysconf("SC_CLK_TCK")


def _is_user(file: str) -> bool:
    path = os.path.realpath(file)
    return not (file.startswith("<") or "site-packages" in path or path.startswith(_OURS) or path.startswith(_LIBRARIES))


# ---- in the parent -----------------------------------------------------------------------------


@dataclass(eq=False)
class Watched:
    """A process whose calls can be looked at, as long as its owner has this. pid: 0 in a sandbox.
    stack: the answer of the process to ``Stack``; raises ``OSError``, ``EOFError``. open: by number
    the method of each call without an answer, and when it began (monotonic)."""

    pid: Callable[[], int]
    stack: Callable[[], Awaitable[bytes]]
    open: dict[int, tuple[str, float]] = field(default_factory=dict[int, tuple[str, float]])

    def __post_init__(self) -> None:
        _WATCHED.add(self)


_WATCHED: weakref.WeakSet[Watched] = weakref.WeakSet()


async def looks(seconds: float) -> list[Look]:
    """What the processes do whose oldest call has no answer for some seconds, the oldest call
    first."""
    found: list[tuple[float, str, Watched]] = []
    for process in _WATCHED:
        if process.open:
            method, began = min(process.open.values(), key=lambda call: call[1])
            if time.monotonic() - began >= seconds:
                found.append((began, method, process))
    found.sort(key=lambda each: each[0])
    return list(await asyncio.gather(*(look(each.pid(), method, each.stack) for _, method, each in found[:_MOST_LOOKS])))


async def look(pid: int, method: str, asked: Callable[[], Awaitable[bytes]]) -> Look:
    """Look at a process. pid: 0 if it is in a sandbox, where it has no id of this host. asked: the
    answer of the process to ``Stack``."""
    at: At | None = None
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            at = _parsed(await asked())
    except (TimeoutError, OSError, EOFError):
        at = await _signaled(pid) if pid else None
    if at is not None and pid and not at.source:  # the process may not be able to open another file
        at = _with_source(at, pid)
    if at is not None and at.does:
        if pid and at.process:  # what that one waits for in turn
            does, fix = await _of_kernel(at.process, None)
            at = at._replace(does=f"{at.does}, which {does}" if does else at.does, fix=fix or at.fix)
        return Look(pid, method, at if at.file else None, at.does, at.fix)
    does, fix = await _of_kernel(pid, at) if pid else ("", "")
    if at is not None and at.context:
        does = ", ".join(filter(None, (does, at.context)))
        cause = at.context.rpartition(_HANDLES)[2]
        fix = fix or (f"see what causes {cause}" if _HANDLES in at.context else "")
    return Look(pid, method, at, does, fix)


_LOOKING: set[int] = set()
"""Processes that a thread looks at. It may block, as the process does."""


async def _of_kernel(pid: int, at: At | None) -> tuple[str, str]:
    """``_kernel`` in a separate thread; nothing waits for it longer than a moment."""
    if pid in _LOOKING:
        return "", ""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[tuple[str, str]] = loop.create_future()

    def answer(does: tuple[str, str]) -> None:
        if not found.done():
            found.set_result(does)

    def ask() -> None:
        does = "", ""
        try:
            does = _kernel(pid, at)
        finally:
            _LOOKING.discard(pid)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(answer, does)

    _LOOKING.add(pid)
    threading.Thread(target=ask, name="look", daemon=True).start()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_KERNEL_SECONDS):
            return await found
    return "", ""


def _parsed(answer: bytes) -> At | None:
    """The first line of an answer; None without one, or if code in a sandbox forged it."""
    with contextlib.suppress(ValueError, TypeError, IndexError):
        file, line, function, inner, does, fix, thread, process, calls, source, context = json.loads(answer)[0]
        texts = [" ".join(str(text).split())[:_LONGEST] for text in (file, function, does, fix, calls)]
        known = (texts[0], int(line), texts[1], tuple(map(str, inner)), texts[2], texts[3], int(thread), int(process))
        return At(*known, calls=texts[4], source=_shown(str(source)), context=" ".join(str(context).split())[:_LONGEST])
    return None


async def _signaled(pid: int) -> At | None:
    """The line that faulthandler writes in the process; None if the process did not prepare it."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        path = next(file for file in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(file).startswith(f"/memfd:{_FILE}"))
        if not int(_field(pid, "SigCgt"), 16) >> (_signal() - 1) & 1:
            return None
        os.truncate(path, 0)
        os.kill(pid, _signal())
        deadline = time.monotonic() + _SIGNAL_SECONDS
        while time.monotonic() < deadline:
            await asyncio.sleep(0.01)
            if path.stat().st_size:
                await asyncio.sleep(0.01)  # it writes line by line
                at = _user_line(_written(path.read_text(errors="replace")))
                return at and _with_source(at, pid)
    return None


_WRITTEN = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def _written(text: str) -> Iterator[_Line]:
    """The lines of the main thread, which faulthandler writes last, the innermost first."""
    for line in text.strip().rpartition("\n\n")[2].splitlines():
        if found := _WRITTEN.fullmatch(line):
            yield _Line(found[1], int(found[2]), found[3])


def _field(pid: int, name: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith(name + ":"))


# Numbers of system calls that block.
_CALLS: dict[str, dict[str, tuple[int, ...]]] = {
    "x86_64": {
        "read": (0, 17, 19, 295), "write": (1, 18, 20, 77, 296), "sync": (74, 75, 277), "close": (3,), "open": (2,),
        "openat": (257,), "poll": (7, 232, 271, 281), "select": (23, 270), "connect": (42,), "recv": (45, 47), "wait": (61, 247),
        "fcntl": (72,), "flock": (73,), "futex": (202,), "sleep": (35, 230),
    },
    "aarch64": {
        "read": (63, 65, 67, 69), "write": (46, 64, 66, 68, 70), "sync": (82, 83, 84), "close": (57,), "openat": (56,),
        "poll": (22, 73), "select": (72,), "connect": (203,), "recv": (207, 212), "wait": (95, 260),
        "fcntl": (25,), "flock": (32,), "futex": (98,), "sleep": (101, 115),
    },
}  # fmt: skip


def _kernel(pid: int, at: At | None, waiters: tuple[int, ...] = ()) -> tuple[str, str]:
    """What the kernel says that the thread of a line waits for, and what ends it. waiters: the
    processes that wait for this one."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        thread = at.thread if at is not None and at.thread else pid
        state = _thread_state(pid, thread)
        if state == "T":
            return "is stopped by a signal", f"continue it: `kill -CONT {pid}`"
        if state == "t":
            return "is stopped by a debugger", f"see which process traces process {pid} (TracerPid in /proc/{pid}/status)"
        call, arguments = _system_call(pid, thread)
        first = arguments[0] if arguments else 0
        inner = at.inner if at is not None else ()
        if call == "running":
            return _computes(pid)
        if call == "flock" or call == "fcntl":
            return _file_lock(pid, first, waiters)
        if call == "wait" or any("subprocess" in name for name in inner):
            return _child(pid, waiters)
        if call == "futex":
            return next((pool for name, pool in _POOLS.items() if name in inner), ("waits for a lock or a thread", ""))
        if call == "sleep":  # a library may sleep between two tries to get a lock, as SQLite does
            return _locked_elsewhere(pid, waiters) or _descriptors(pid) or (_sleep(pid, arguments), "")
        if call == "write" and _link(pid, first).startswith("pipe:"):
            return _full_pipe(pid, first)
        if call == "read" and (at is not None or waiters) and _link(pid, first).startswith("pipe:"):
            return _empty_pipe(pid, first, waiters)
        if call in ("open", "openat") and (waits := _opened_pipe(pid, _text_at(pid, arguments[call == "openat"]))):
            return waits
        if blocked := _file_system(pid, call, arguments, state == "D"):
            return blocked
        sockets = _sockets(pid)
        if call == "poll" and (polled := {link: sockets[link] for link in _polled(pid, arguments) if link in sockets}):
            return _silent(pid, list(polled.values()), waiters)
        if call in ("read", "recv", "connect"):
            link = _link(pid, first)
            if link in sockets:
                return _silent(pid, [sockets[link]], waiters)
            if link.startswith("/"):
                return f"reads {link}", f"see why {link} has no data"
        if call in ("poll", "select") and (not inner or any(name in _NETWORK or "http" in name for name in inner)) and sockets:
            return _silent(pid, list(sockets.values()), waiters)
        if at is not None and at.calls == "getaddrinfo":
            return (
                "resolves a host name (getaddrinfo)",
                "see why the name does not resolve: `getent hosts NAME`, /etc/resolv.conf",
            )
        if call == "poll" and "streams.py" in inner and _children(pid):  # of asyncio
            return _child(pid, waiters)
        if call == "poll":
            return next((does for name, does in _AWAITED.items() if name in inner), ""), ""
    return "", ""


_POOLS = {
    "connection_pool.py": (
        "waits for a free connection of an HTTP connection pool (httpx)",
        "close each response (`with client.stream(..)`), or raise `httpx.Limits`; a pool timeout makes it an error",
    ),
    "connectionpool.py": (
        "waits for a free connection of an HTTP connection pool (urllib3)",
        "close each response, or raise `maxsize` of the pool; a pool timeout makes it an error",
    ),
}
"""Library files in which a thread waits for a connection that other code of the process has."""
_AWAITED = {"locks.py": "awaits a lock", "queues.py": "awaits an item of a queue", "tasks.py": "awaits a task or a timer"}


_NETWORK = {
    "socket.py",
    "ssl.py",
    "streams.py",
    "selector_events.py",
    "base_events.py",
    "connection.py",
    "connector.py",
    "client.py",
}


def _system_call(pid: int, thread: int) -> tuple[str, list[int]]:
    """The system call in which a thread is, and its arguments; ``running`` if it is in none, and
    empty if that is not known."""
    fields = Path(f"/proc/{pid}/task/{thread}/syscall").read_text().split()
    if fields[0] == "running":
        return "running", []
    calls = _CALLS.get(platform.machine(), {})
    name = next((name for name, numbers in calls.items() if int(fields[0]) in numbers), "")
    return name, [int(field, 16) for field in fields[1:7]]


def _thread_state(pid: int, thread: int) -> str:
    """The letter of proc(5): D if it is in the kernel and no signal ends that."""
    return Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(") ")[2][0]


def _file_system(pid: int, call: str, arguments: list[int], whole: bool) -> tuple[str, str] | None:
    """The file that a call waits for, and its mount; None if that is not why it waits. whole: no
    signal ends the call."""
    if call in ("open", "openat"):
        path = _text_at(pid, arguments[call == "openat"])
    elif call in ("read", "write", "sync", "close"):
        path = _link(pid, arguments[0])
    else:
        return None
    if not path.startswith("/") or path.startswith("/dev/") or (call in ("open", "openat", "read") and _is_pipe(pid, path)):
        return None
    mount, kind = _mount(pid, path)
    if kind.startswith("fuse") and (server := _fuse_server(mount)):
        does, fix = _does(server, (pid,))
        return (
            f"{BLOCKED if whole else 'waits in the kernel'}: the {call.removesuffix('at')} of {path} waits for process {server} "
            f"(`{_command(server)}`), which serves the file system at {mount} ({kind})" + (f" and {does}" if does else ""),
            fix or f"see why process {server} does not answer; `fusermount -uz {mount}` ends its calls with an error",
        )
    return (
        f"{BLOCKED if whole else 'waits in the kernel'}: the {call.removesuffix('at')} of {path} waits for the file system at "
        f"{mount} ({kind})",
        f"see why {mount} does not answer: it is frozen (`fsfreeze -u {mount}`), its server is gone, or its disk fails (`dmesg`)",
    )


def _is_pipe(pid: int, path: str) -> bool:
    """Whether a path is a named pipe, which waits for its other end. It does not ask a file system
    that does not answer: those of the network have no pipes."""
    with contextlib.suppress(OSError):  # it is being made
        return _mount(pid, path)[1] in _LOCAL and stat.S_ISFIFO(os.stat(f"/proc/{pid}/root{path}").st_mode)
    return False


_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "overlay", "tmpfs", "zfs"}


def _full_pipe(pid: int, number: int) -> tuple[str, str]:
    """Who has the other end of a pipe that a process can't write to."""
    link = _link(pid, number)
    name = {1: "its output", 2: "its error output"}.get(number, "a pipe")
    readers = _with_link(link, os.O_RDONLY)
    named = " and ".join(f"process {reader} (`{_command(reader)}`)" for reader in readers[:_MOST]) or "nobody"
    return (
        f"is blocked in a write to {name}, a full pipe that {named} should read",
        "read the pipe while the process runs: `communicate()` does, `wait()` does not; or send the output to a file",
    )


def _empty_pipe(pid: int, number: int, waiters: tuple[int, ...]) -> tuple[str, str]:
    """Who has the other end of a pipe that a process reads, and what that one waits for."""
    writers = _with_link(_link(pid, number), os.O_WRONLY)
    others = [writer for writer in writers if writer != pid]
    what = "its input, a pipe" if number == 0 else "a pipe"
    if not others:
        if not writers:
            return "", ""  # it is at its end
        return f"reads {what} that only it has open for writing", "close its end for writing: the read ends then"
    if waiting := [writer for writer in others if writer in waiters]:  # in a circle
        return (
            f"reads {what} that process {waiting[0]}, which waits, has open for writing",
            "close the pipe (`stdin.close()`) before the output is read, or use `communicate()`",
        )
    does, fix = _kernel(others[0], None, (*waiters, pid)) if len(waiters) < _MOST else ("", "")
    first, *more = [f"process {writer} (`{_command(writer)}`)" for writer in others[:_MOST]]
    also = f" (as {' and '.join(more)} {'have' if len(more) > 1 else 'has'})" if more else ""
    return (
        f"reads {what} that {first} has open for writing{also}" + (f", which {does}" if does else ""),
        fix or f"see why process {others[0]} writes nothing; `kill {others[0]}` ends it",
    )


def _with_link(link: str, access: int | None = None) -> list[int]:
    """The processes that have a descriptor with this link. access: as in open(2); None: any."""
    found: list[int] = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError, StopIteration, ValueError):
            if process.name.isdecimal() and any(_has(process, file, link, access) for file in (process / "fd").iterdir()):
                found.append(int(process.name))
    return sorted(found)


def _has(process: Path, file: Path, link: str, access: int | None) -> bool:
    if os.readlink(file) != link:
        return False
    if access is None:
        return True
    info = (process / "fdinfo" / file.name).read_text()
    flags = next(line.split()[1] for line in info.splitlines() if line.startswith("flags:"))
    return int(flags, 8) & os.O_ACCMODE == access


def _text_at(pid: int, address: int) -> str:
    """The text at an address of a process."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(min(_LONGEST, 4096 - address % 4096)).partition(b"\0")[0].decode(errors="replace")
    return ""


def _mount(pid: int, path: str) -> tuple[str, str]:
    """The mount point of a file, and its file system."""
    best = ("/", "?")
    for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
        fields = line.split()
        point = fields[4].replace("\\040", " ")
        if len(point) >= len(best[0]) and (path == point or path.startswith(point.rstrip("/") + "/")):
            best = (point, fields[fields.index("-") + 1])
    return best


def _computes(pid: int) -> tuple[str, str]:
    began, before = time.monotonic(), _cpu_seconds(pid)
    time.sleep(_BUSY_SECONDS)
    share = (_cpu_seconds(pid) - before) / (time.monotonic() - began)
    return f"computes, with {min(100, 100 * share):.0f} % of a core", ""


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(fields[0]) / 1e9


def _children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


def _child(pid: int, waiters: tuple[int, ...]) -> tuple[str, str]:
    """The newest process that a process has started, and what that waits for."""
    children = _children(pid)
    if not children:
        return "waits for a process to end", ""
    child = children[-1]
    does, fix = _kernel(child, None, (*waiters, pid)) if len(waiters) < _DEEPEST else ("", "")
    waits = f"waits for process {child} (`{_command(child)}`)" + (f", which {does}" if fix else "")
    return waits, fix or f"see why process {child} does not end; `kill {child}` ends it"


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return text[:77] + "..." if len(text) > 80 else text
    return "?"


def _link(pid: int, number: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/fd/{number}")
    return ""


def _file_lock(pid: int, number: int, waiters: tuple[int, ...]) -> tuple[str, str]:
    """The file of a lock, and the processes that hold it."""
    path = _link(pid, number)
    inode = _inode(pid, number)
    for lock in _locks():
        if lock.inode == inode and (named := _holders(lock, path, (*waiters, pid))):
            holders, fix = named
            return f"waits for the lock of {path}, which {holders}", fix
    return f"waits for the lock of {path}", "see which process holds the lock: `cat /proc/locks`"


def _locked_elsewhere(pid: int, waiters: tuple[int, ...]) -> tuple[str, str] | None:
    """A file that this process has open, and whose lock for writing another process holds."""
    opened: dict[int, str] = {}
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if (path := os.readlink(file)).startswith("/") and not path.startswith(("/dev/", "/proc/", "/memfd:")):
                opened[_inode(pid, int(file.name))] = path
    for lock in _locks():
        if (
            lock.writes
            and lock.pid != pid
            and lock.inode in opened
            and not (lock.described and _shares(Path(f"/proc/{pid}"), lock.inode))  # it has inherited the lock
            and (named := _holders(lock, opened[lock.inode], (*waiters, pid)))
        ):
            holders, fix = named
            return f"sleeps, and has {opened[lock.inode]} open, whose lock {holders}", fix
    return None


def _inode(pid: int, number: int) -> int:
    """The inode of an open file; 0 if it is not known. It does not ask a file system that may not
    answer."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        info = Path(f"/proc/{pid}/fdinfo/{number}").read_text().splitlines()
        if (line := next((line for line in info if line.startswith("ino:")), None)) is not None:
            return int(line.split()[1])
        if (path := _link(pid, number)).startswith("/") and _mount(pid, path)[1] in _LOCAL:  # before Linux 5.14
            return os.stat(f"/proc/{pid}/fd/{number}").st_ino
    return 0


class _Lock(NamedTuple):
    """A lock of a file that a process holds. described: it belongs to an open file description,
    which processes inherit, and not to one process."""

    inode: int
    pid: int
    writes: bool
    described: bool


def _locks() -> Iterator[_Lock]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if "->" not in fields and len(fields) > 5:
                yield _Lock(int(fields[5].rpartition(":")[2]), int(fields[4]), fields[3] == "WRITE", fields[1] != "POSIX")


def _holders(lock: _Lock, path: str, waiters: tuple[int, ...]) -> tuple[str, str] | None:
    """Who holds a lock, what that one waits for, and what ends that; None if its process is in
    another namespace."""
    pids = ([lock.pid] if lock.pid > 0 and Path(f"/proc/{lock.pid}").exists() else []) if not lock.described else _sharing(lock)
    if not pids:
        return None
    named = [f"process {pid} (`{_command(pid)}`)" for pid in pids[:_MOST]]
    if len(pids) == 1:
        does, fix = _does(pids[0], waiters)
        if fix:
            return f"{named[0]} holds, and which {does}", fix
        return f"{named[0]} holds", f"see why process {pids[0]} holds the lock of {path}; the lock ends with it"
    numbers = " ".join(map(str, pids))
    return (
        f"{' and '.join(named)} hold",
        f"see why processes {numbers} hold the lock of {path}; the lock ends when all of them have ended",
    )


def _sharing(lock: _Lock) -> list[int]:
    """The processes that have the open file description of a lock: who locked it may have ended."""
    found: list[int] = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and _shares(process, lock.inode):
            found.append(int(process.name))
    return sorted(found)


def _shares(process: Path, inode: int) -> bool:
    with contextlib.suppress(OSError):
        for file in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                if _inode(int(process.name), int(file.name)) == inode:
                    info = (process / "fdinfo" / file.name).read_text()
                    if any(line.startswith("lock:") and "POSIX" not in line for line in info.splitlines()):
                        return True
    return False


def _polled(pid: int, arguments: list[int]) -> list[str]:
    """The links of the descriptors of a poll; empty for an epoll, whose first argument is no
    address."""
    with contextlib.suppress(OSError, OverflowError), open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(arguments[0])
        entries = memory.read(8 * min(arguments[1], _MOST_POLLED))
        return [_link(pid, int.from_bytes(entries[i : i + 4], sys.byteorder)) for i in range(0, len(entries), 8)]
    return []


class _Connection(NamedTuple):
    """An open connection. local, remote: addresses. connecting: it is not connected yet."""

    local: str
    remote: str
    connecting: bool


def _sockets(pid: int) -> dict[str, _Connection]:
    """The connections that a process has opened, by the link of the descriptor. Of UDP it has those
    to name servers."""
    links = {_link(pid, int(file.name)) for file in Path(f"/proc/{pid}/fd").iterdir()}
    found: dict[str, _Connection] = {}
    served: set[str] = set()  # ports on which it listens: it has accepted the connections to them
    for table, each in _connections(pid):
        if each.link not in links:
            continue
        if each.state == _LISTENS:
            served.add(_port(each.local))
        elif each.state in (_CONNECTED, _CONNECTING) and (table.startswith("tcp") or each.remote.endswith(_NAME_SERVER)):
            found[each.link] = _Connection(each.local, each.remote, table.startswith("tcp") and each.state == _CONNECTING)
    return {link: each for link, each in found.items() if _port(each.local) not in served}


_CONNECTED, _CONNECTING, _LISTENS = "01", "02", "0A"


class _Entry(NamedTuple):
    """A line of /proc/net/tcp."""

    local: str
    remote: str
    state: str
    link: str


def _connections(pid: int) -> Iterator[tuple[str, _Entry]]:
    """The connections in the network namespace of a process, with the table that has them."""
    for table in ("tcp", "tcp6", "udp", "udp6"):
        with contextlib.suppress(OSError):
            for line in itertools.islice(Path(f"/proc/{pid}/net/{table}").read_text().splitlines(), 1, None):
                fields = line.split()
                yield table, _Entry(_address(fields[1]), _address(fields[2]), fields[3], f"socket:[{fields[9]}]")


def _port(address: str) -> str:
    return address.rpartition(":")[2]


def _peer(pid: int, connection: _Connection) -> int:
    """The process of this host at the other end of a connection: that has it, or listens for it. 0
    without one."""
    entries = [entry for table, entry in _connections(pid) if table.startswith("tcp")]
    own = {connection.local, _mapped(connection.local)}
    far = {connection.remote, _mapped(connection.remote)}
    links = [e.link for e in entries if e.local in far and e.remote in own]
    if links or connection.remote.startswith(("127.", "[::1]")):
        anywhere = {f"{host}:{_port(connection.remote)}" for host in ("0.0.0.0", "[::]")}
        links += [e.link for e in entries if e.state == _LISTENS and e.local in far | anywhere]
    for link in links:
        if (owners := _with_link(link)) and owners[0] != pid:
            return owners[0]
    return 0


def _mapped(address: str) -> str:
    """An IPv4 address as an IPv6 socket has it."""
    return f"[::ffff:{address.rpartition(':')[0]}]:{_port(address)}"


def _address(text: str) -> str:
    """The address of a line of /proc/net/tcp."""
    host, _, port = text.partition(":")
    words = b"".join(int(host[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(host), 8))
    name = socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words)
    return f"{name}:{int(port, 16)}" if len(words) == 4 else f"[{name}]:{int(port, 16)}"


def _silent(pid: int, connections: list[_Connection], waiters: tuple[int, ...]) -> tuple[str, str]:
    addresses = [each.remote for each in connections]
    servers = sorted({address for address in addresses if address.endswith(_NAME_SERVER)})[:_MOST]
    if servers:  # a request follows the resolution of its host
        named = ", ".join(servers)
        return (
            f"resolves a host name, and waits for the name server {named}",
            f"see why the name server {named} does not answer; /etc/resolv.conf names it",
        )
    named = ", ".join(sorted(set(addresses))[:_MOST])
    awaited, fails = (
        ("a connection to", "accepts no connection") if connections[0].connecting else ("an answer of", "does not answer")
    )
    waits, fix = f"waits for {awaited} {named}", f"see why {named} {fails}; restart it, or give the request a timeout"
    peer = _peer(pid, connections[0]) if len(set(addresses)) == 1 else 0
    if not peer:
        return waits, fix
    if Path(f"/proc/{peer}/comm").read_text().strip() == _CONTROL_PLANE:
        return (
            f"{waits}, an endpoint of the control plane (process {peer})",
            "see what else the run waits for: a request to its own endpoint may wait for the step that waits for this call; "
            "give the request a timeout",
        )
    if peer in waiters:
        return f"{waits}, where process {peer} (`{_command(peer)}`) listens, which waits for this one", fix
    does, deeper = _does(peer, (*waiters, pid))
    return (
        f"{waits}, where process {peer} (`{_command(peer)}`) listens" + (f", which {does}" if does else ""),
        deeper or f"see why process {peer} {fails}, or give the request a timeout",
    )


_CONTROL_PLANE = "rolloutd"


def _does(pid: int, waiters: tuple[int, ...]) -> tuple[str, str]:
    """What a process does that others wait for, and what ends that; empty if nothing is known. Of
    several threads it is one that waits for something."""
    if len(waiters) >= _DEEPEST:
        return "", ""
    with contextlib.suppress(OSError):
        threads = sorted(int(task.name) for task in Path(f"/proc/{pid}/task").iterdir())
        for thread in threads[:_MOST_THREADS]:
            if _system_call(pid, thread)[0] == "running" and _thread_state(pid, thread) not in ("T", "t"):
                continue
            does, fix = _kernel(pid, At("", 0, "", thread=thread), waiters)
            if fix and not does.startswith(_READS):  # a process may wait for commands in a pipe
                return does, fix
    return "", ""


_READS = "reads "
_MOST_THREADS = 64


def _opened_pipe(pid: int, path: str) -> tuple[str, str] | None:
    """A named pipe that a process opens, which waits for its other end."""
    if not path.startswith("/") or not _is_pipe(pid, path):
        return None
    return (
        f"opens {path}, a named pipe that no process has open at its other end",
        f"start what should read or write {path}, or correct the path",
    )


def _fuse_server(mount: str) -> int:
    """The process that serves a file system: of those with /dev/fuse the one whose command has the
    mount point, or the only one. 0 if it is not known."""
    servers = _with_link("/dev/fuse")
    named = [server for server in servers if mount in Path(f"/proc/{server}/cmdline").read_text(errors="replace").split("\0")]
    found = named or servers
    return found[0] if len(found) == 1 else 0


def _descriptors(pid: int) -> tuple[str, str] | None:
    """That a process has all descriptors open that it may have."""
    fields = next(
        line.split() for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if line.startswith("Max open files")
    )
    links = Counter(_link(pid, int(file.name)) for file in Path(f"/proc/{pid}/fd").iterdir())
    if not fields[3].isdecimal() or links.total() < int(fields[3]):
        return None
    link, count = links.most_common(1)[0]
    most = f", {count} of them of {link}" if count > 1 else ""
    return (
        f"sleeps, and has {links.total()} files open{most}: the limit is {fields[3]}, so it can open no other",
        "close each file (`with open(..)`), or raise the limit (`ulimit -n`)",
    )


def _sleep(pid: int, arguments: list[int]) -> str:
    """How long a process sleeps."""
    with contextlib.suppress(OSError, OverflowError, IndexError), open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        with_clock = arguments[0] < _CLOCKS  # clock_nanosleep(clock, flags, time); nanosleep(time) has an address there
        memory.seek(arguments[2] if with_clock else arguments[0])
        data = memory.read(16)
        seconds = int.from_bytes(data[:8], sys.byteorder) + int.from_bytes(data[8:], sys.byteorder) / 1e9
        if with_clock and arguments[1] & 1:  # TIMER_ABSTIME
            left = seconds - (time.monotonic() if arguments[0] == 1 else time.time())
            return f"sleeps for another {left:.0f} s" if left >= 1 else "sleeps"
        return f"sleeps for {seconds:.0f} s" if seconds >= 1 else "sleeps"
    return "sleeps"


_CLOCKS = 16
