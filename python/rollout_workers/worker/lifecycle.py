"""The states of a worker process.

starting -> serving -SIGTERM, SIGINT-> draining -> exited (exit code 0)
                    -fence()--------> exited (exit code 3)
                    -no progress----> exited (exit code 4), see watchdog.py
any -end of file on stdin-> exited at once    any -second signal-> exited at once (exit code 130)
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import stat
import sys
import threading
from typing import NoReturn, TypeVar

log = logging.getLogger(__name__)

EXIT_DONE = 0
EXIT_CRASH = 1
EXIT_FENCED = 3
EXIT_STALLED = 4
EXIT_REFUSED = 78
"""The configuration can't work (EX_CONFIG of sysexits), so the worker is not restarted."""
EXIT_HARD = 130
LEAVE_SECONDS = 10.0
"""How long a fenced or crashed worker may take to shut down."""

T = TypeVar("T")


class Lifecycle:
    """Decides when the worker shuts down, and with which exit code. Create it on the event
    loop."""

    def __init__(self, exit_after: float | None = None) -> None:
        """exit_after: seconds after which a fenced or crashed worker that has not stopped is
        killed."""
        self._exit_after = exit_after
        self._loop = asyncio.get_running_loop()
        self._leaving = asyncio.Event()
        self._signals = 0
        self.exit_code = EXIT_DONE
        self.reason = ""

    def watch(self) -> None:
        """Listen to SIGTERM and SIGINT, and to the end of stdin."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)
        watch_stdin()

    @property
    def leaving(self) -> bool:
        """Whether the worker is shutting down."""
        return self._leaving.is_set()

    async def unless_leaving(self, task: asyncio.Task[T]) -> T | None:
        """The task's result. Cancels the task and returns None if the worker shuts down first."""
        leaving = asyncio.create_task(self.wait())
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if task.done():
            return task.result()
        task.cancel()
        return None

    def drain(self) -> None:
        """Finish work in progress, then exit."""
        self._leaving.set()

    def fence(self, reason: str) -> None:
        """Stop the worker: its weights can't be verified, or a newer one replaced it. Call it from
        the event loop."""
        if not self._leaving.is_set():
            log.error("fenced: %s", reason)
            self.exit_code, self.reason = EXIT_FENCED, reason
            self._leaving.set()
            self._leave_soon()

    def superseded(self, incarnation: int) -> None:
        """Fence the worker because a newer incarnation of the run has started. Thread-safe."""
        self._loop.call_soon_threadsafe(self.fence, f"incarnation {incarnation} of the run exists")

    def lost(self, reason: str) -> None:
        """``crash`` for other threads."""
        self._loop.call_soon_threadsafe(self.crash, reason)

    def crash(self, reason: str) -> None:
        """Stop the worker because a part of it failed permanently. Call it from the event loop."""
        if not self._leaving.is_set():
            self.exit_code, self.reason = EXIT_CRASH, reason
            self._leave_soon()
        self._leaving.set()

    def _leave_soon(self) -> None:
        """Log what still blocks the shutdown after ``exit_after`` seconds and end the process."""
        if self._exit_after is not None:
            timer = threading.Timer(self._exit_after, _leave_late, [self._exit_after, self.exit_code])
            timer.daemon = True
            timer.start()

    async def wait(self) -> None:
        """Return when the worker starts to shut down."""
        await self._leaving.wait()

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        if self._signals > 1:
            leave_now(EXIT_HARD)
        log.info("%s: finishing work in progress; send the signal again to stop at once", signal.Signals(number).name)
        self.drain()


def prepare_process() -> None:
    """Print the tracebacks of all threads on a fatal signal and on SIGUSR1."""
    faulthandler.enable()
    with contextlib.suppress(AttributeError, ValueError, OSError):
        faulthandler.register(signal.SIGUSR1, all_threads=True)


def watch_stdin(descriptor: int = 0) -> None:
    """Exit at once when the pipe on stdin closes, because the parent process has ended. Ignores
    terminals and files."""
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode) and not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return
    except OSError:
        return
    threading.Thread(target=_wait_for_end, args=(descriptor,), name="stdin", daemon=True).start()


def _wait_for_end(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(descriptor, 4096):
            pass
    leave_now(EXIT_DONE)


def _leave_late(seconds: float, code: int) -> None:
    log.error("the worker did not shut down within %g s; the stacks of all threads follow", seconds)
    faulthandler.dump_traceback(all_threads=True)
    leave_now(code)


def leave_now(code: int) -> NoReturn:
    """Exit without running cleanup handlers. No part of the worker needs them."""
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    os._exit(code)
