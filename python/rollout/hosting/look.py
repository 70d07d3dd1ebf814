"""What a process of plugins does now: the line of the user's code, and what the kernel says that it
waits for. Nothing is recorded before someone asks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from rollout.hosting.kernel import field_of, waits_for
from rollout.hosting.lines import FILE, HANDLES, At, parsed, signal_number, user_line, with_source, written

_ANSWER_SECONDS = 0.4
_SIGNAL_SECONDS = 0.2
_MOST_LOOKS = 8
_KERNEL_SECONDS = 2.0


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
            at = parsed(await asked())
    except (TimeoutError, OSError, EOFError):
        at = await _signaled(pid) if pid else None
    if at is not None and pid and not at.source:  # the process may not be able to open another file
        at = with_source(at, pid)
    if at is not None and at.does:
        if pid and at.process:  # what that one waits for in turn
            does, fix = await _of_kernel(at.process, None)
            at = at._replace(does=f"{at.does}, which {does}" if does else at.does, fix=fix or at.fix)
        return Look(pid, method, at if at.file else None, at.does, at.fix)
    does, fix = await _of_kernel(pid, at) if pid else ("", "")
    if at is not None and at.context:
        does = ", ".join(filter(None, (does, at.context)))
        cause = at.context.rpartition(HANDLES)[2]
        fix = fix or (f"see what causes {cause}" if HANDLES in at.context else "")
    return Look(pid, method, at, does, fix)


_LOOKING: set[int] = set()
"""Processes that a thread looks at. It may block, as the process does."""


async def _of_kernel(pid: int, at: At | None) -> tuple[str, str]:
    """``waits_for`` in a separate thread; nothing waits for it longer than a moment."""
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
            does = waits_for(pid, at.thread, at.inner, at.calls) if at is not None else waits_for(pid)
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


async def _signaled(pid: int) -> At | None:
    """The line that faulthandler writes in the process; None if the process did not prepare it."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        path = next(file for file in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(file).startswith(f"/memfd:{FILE}"))
        if not int(field_of(pid, "SigCgt"), 16) >> (signal_number() - 1) & 1:
            return None
        os.truncate(path, 0)
        os.kill(pid, signal_number())
        deadline = time.monotonic() + _SIGNAL_SECONDS
        while time.monotonic() < deadline:
            await asyncio.sleep(0.01)
            if path.stat().st_size:
                await asyncio.sleep(0.01)  # it writes line by line
                at = user_line(written(path.read_text(errors="replace")))
                return at and with_source(at, pid)
    return None
