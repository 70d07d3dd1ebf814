"""The line of the user's code at which a process is.

The process answers the request ``Stack`` from a separate thread, also while the user's code
blocks. Code that holds the interpreter, such as a regular expression, lets no thread run; then a
signal makes faulthandler write the lines into a file in memory, ``FILE``.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import faulthandler
import fcntl
import json
import os
import re
import signal
import stat
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple, cast

from rollout.hosting.kernel import LOCAL, began, mount_of, ticks
from rollout.waiting import why

FILE = "rollout-stacks"
_LONGEST = 500  # characters of a text of a process
_SOURCE_CHARACTERS = 80  # of a line
_SOURCE_BYTES = 1 << 20  # that are read of a file
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


def prepare() -> None:
    """Let faulthandler write the lines of this process when it gets the signal."""
    if sys.platform != "linux":
        return
    try:
        file = os.memfd_create(FILE)
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
        faulthandler.register(signal_number(), file=file, all_threads=True)
    except (OSError, ValueError):  # files are not allowed
        return


def signal_number() -> int:
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
    return json.dumps([[*with_source(at, os.getpid())] for at in common]).encode()


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


HANDLES = "while it handles "


def _of_thread(frame: FrameType, handled: object) -> At | None:
    """handled: the exception that the thread handles; a tuple in Python 3.11."""
    at = user_line(_called(frame))
    error = cast(tuple[object, ...], handled)[1] if isinstance(handled, tuple) else handled
    if at is not None and isinstance(error, BaseException):
        with contextlib.suppress(Exception):  # the text is made by the user's code
            url = getattr(error, "url", None) or getattr(getattr(error, "request", None), "url", "")  # of HTTP clients
            named = shown(f"{type(error).__name__}: {error}") + (f" from {shown(str(url))}" if url else "")
            at = at._replace(context=f"{HANDLES}{named}")
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
        pool_began = ticks(f"self/task/{pool._worker_handler.native_id}")
        return any(ticks(str(process.pid)) > pool_began for process in list(pool._pool))
    except (OSError, ValueError, IndexError):
        return False


def _of_task(task: asyncio.Task[Any]) -> At | None:
    at, reason = user_line(_awaited(task)), why(task)
    if reason is None:
        return at
    return (at or At("", 0, ""))._replace(does=reason.text, fix=reason.fix, process=reason.process)


def user_line(lines: Iterable[_Line]) -> At | None:
    """The innermost line that is in no library."""
    inner: list[str] = []
    calls = ""
    for line in lines:
        if _is_user(line.file):
            return At(line.file, line.line, line.function, tuple(inner), calls=calls)
        inner.append(os.path.basename(line.file))
        calls = calls or line.function
    return None


def with_source(at: At, pid: int) -> At:
    """The line with its text, if the file is as it was when its process began."""
    with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
        if not at.file.startswith("/") or mount_of(pid, at.file)[1] not in LOCAL:  # reading others may never end
            return at
        with open(os.open(at.file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode) or info.st_mtime > began(pid) + 1:
                return at
            text = file.read(_SOURCE_BYTES).decode(errors="replace")
        at = at._replace(source=shown(text.split("\n")[at.line - 1 :][0]))
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
            return shown(f"while {ast.unparse(max(around, key=lambda node: node.lineno).test)}:")
    return ""


def shown(source: str) -> str:
    """A line of code for a sentence."""
    text = " ".join(source.split())[:_SOURCE_CHARACTERS]
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text).strip()


def _is_user(file: str) -> bool:
    path = os.path.realpath(file)
    return not (file.startswith("<") or "site-packages" in path or path.startswith(_OURS) or path.startswith(_LIBRARIES))


def parsed(answer: bytes) -> At | None:
    """The first line of an answer; None without one, or if code in a sandbox forged it."""
    with contextlib.suppress(ValueError, TypeError, IndexError):
        file, line, function, inner, does, fix, thread, process, calls, source, context = json.loads(answer)[0]
        texts = [" ".join(str(text).split())[:_LONGEST] for text in (file, function, does, fix, calls)]
        known = (texts[0], int(line), texts[1], tuple(map(str, inner)), texts[2], texts[3], int(thread), int(process))
        return At(*known, calls=texts[4], source=shown(str(source)), context=" ".join(str(context).split())[:_LONGEST])
    return None


_WRITTEN = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def written(text: str) -> Iterator[_Line]:
    """The lines of the main thread, which faulthandler writes last, the innermost first."""
    for line in text.strip().rpartition("\n\n")[2].splitlines():
        if found := _WRITTEN.fullmatch(line):
            yield _Line(found[1], int(found[2]), found[3])
