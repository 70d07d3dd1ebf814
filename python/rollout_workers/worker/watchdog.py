"""Ends a worker whose engine or trainer has stopped making progress.

The worker's other threads continue in that case: they renew its registration and the ack deadlines
of its work items, so nothing else would notice. When the process has exited, its items go to other
workers and the scheduler restarts it.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NoReturn

from rollout_workers.worker.lifecycle import EXIT_STALLED, leave_now

log = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
LIMIT_SECONDS = 300.0
"""The default of ``limits.stall_seconds``."""
_LAST_LINE = "stalled: "
"""Begins the last line of the output. ``Exit.String`` in services/scheduler/launch shows the
rest."""

Observe = Callable[[], Hashable | None]


@dataclass(slots=True)
class _Source:
    what: str
    observe: Observe
    seen: Hashable | None = None
    still: float = 0.0  # seconds without progress


class Watchdog:
    """Compares the progress of some sources once a second, in its own thread."""

    def __init__(self, seconds: float, stalled: Callable[[str], None] | None = None) -> None:
        """seconds: the longest time without progress; 0: ``LIMIT_SECONDS``. stalled: called in the
        thread with the reason, once; None: log the stacks of all threads and exit with
        ``EXIT_STALLED``."""
        self._limit, self._stalled = seconds or LIMIT_SECONDS, stalled or _leave
        self._sources: list[_Source] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def add(self, what: str, observe: Observe) -> None:
        """Watch a source. what: the reason if it makes no progress. observe: called from the
        thread; its value changes with the progress, and is None while there is nothing to do. If it
        raises, nothing is known, which counts as progress."""
        self._sources.append(_Source(what, observe))

    def start(self) -> None:
        """Start to compare."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._stop.set()

    @property
    def still(self) -> tuple[float, float]:
        """The longest time in which a source has made no progress, and the limit, in seconds. May
        be called by any thread."""
        return max((source.still for source in self._sources), default=0.0), self._limit

    def check(self, passed: float) -> str:
        """Compare once. passed: seconds since the last call. Returns why the worker is stalled, or
        an empty string."""
        for source in self._sources:
            try:
                seen = source.observe()
            except Exception:
                log.debug("can't observe: %s", source.what, exc_info=True)
                seen = None
            if seen is None or seen != source.seen:
                source.seen, source.still = seen, 0.0
                continue
            source.still += passed
            if source.still >= self._limit:
                return f"{source.what} for {source.still:.0f} s (limits.stall_seconds = {self._limit:g})"
        return ""

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(CHECK_SECONDS):
            now = time.monotonic()
            # A gap means that the whole process was stopped, not that a part of it is stuck.
            if why := self.check(min(now - last, 2 * CHECK_SECONDS)):
                self._stalled(why)
                return
            last = now


def _leave(why: str) -> NoReturn:
    log.error("%s; the stacks of all threads follow", why)
    faulthandler.dump_traceback(all_threads=True)
    print(f"{_LAST_LINE}{why}", file=sys.stderr, flush=True)
    leave_now(EXIT_STALLED)


class LoopBeat:
    """Counts up on the event loop of the caller, so that other threads see whether it is
    blocked."""

    def __init__(self) -> None:
        self.count = 0

    async def run(self) -> None:
        """Count until cancelled."""
        while True:
            self.count += 1
            await asyncio.sleep(CHECK_SECONDS)
