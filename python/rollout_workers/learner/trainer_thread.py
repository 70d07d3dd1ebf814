"""Owns the trainer and runs every call to it in one thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from rollout_workers.trainer import Trainer

log = logging.getLogger(__name__)
T = TypeVar("T")


THREAD = "train"
"""Begins the name of the thread."""


class TrainerThread:
    """A trainer and its thread. Call the methods from one event loop; calls to the trainer run one
    after the other."""

    def __init__(self, trainer: Trainer, executor: ThreadPoolExecutor) -> None:
        """executor: one thread, in which ``trainer`` was built. See ``start``."""
        self._trainer, self._executor = trainer, executor
        self._activities: list[tuple[str, str, float]] = []  # reason, what, since when
        self._idle = "waiting for Initialize (learner-controller)"

    @classmethod
    async def start(cls, build: Callable[[], Trainer]) -> TrainerThread:
        """Start the thread and build the trainer in it."""
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=THREAD)
        try:
            return cls(await asyncio.get_running_loop().run_in_executor(executor, build), executor)
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise

    @property
    def step(self) -> int:
        """The trainer's current step."""
        return self._trainer.step

    @property
    def activity(self) -> str:
        """What the learner does now, for its status."""
        return self._activities[-1][1] if self._activities else self._idle

    @property
    def wait(self) -> tuple[str, str, float] | None:
        """Reason, what the learner does now, and since when, in seconds since 1970; None if it is
        idle."""
        return self._activities[-1] if self._activities else None

    @contextlib.contextmanager
    def doing(self, reason: str, activity: str) -> Iterator[None]:
        """Report ``activity`` inside the block. reason: as in ``Wait.reason``."""
        entry = reason, activity, time.time()
        self._activities.append(entry)
        try:
            yield
        finally:
            self._activities.remove(entry)

    def ready_for_batches(self) -> None:
        """Report from now on that an idle learner waits for a batch."""
        self._idle = "waiting for a batch (learner-controller)"

    async def run(self, work: Callable[[Trainer], T]) -> T:
        """Call ``work`` with the trainer in its thread, after the calls before it."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, self._trainer)

    def run_later(self, seconds: float, work: Callable[[Trainer], None]) -> None:
        """Call ``work`` after ``seconds``. A failure is only logged."""

        def submit() -> None:
            with contextlib.suppress(RuntimeError):  # closed
                self._executor.submit(work, self._trainer).add_done_callback(_log_failure)

        asyncio.get_running_loop().call_later(seconds, submit)

    def close(self) -> None:
        """Accept no more calls. A running call finishes."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _log_failure(done: Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.warning("could not prepare for the next weights: %s", error)
