"""What a learner says that it does, when someone asks."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollout.learner.v1 import learner_pb2 as pb
from rollout.wait.v1.wait_pb2 import Wait
from rollout_workers.learner.server import LearnerServer
from rollout_workers.learner.trainer_thread import THREAD
from rollout_workers.worker.spec import Identity
from rollout_workers.worker.watchdog import Watchdog


async def _wait(still: tuple[float, float]) -> Wait:
    learner = SimpleNamespace(
        step=1,
        initialized=True,
        activity="training",
        weights=SimpleNamespace(digest="blake3-1"),
        wait=("TRAIN", "training step 2 on 12 samples", time.time() - 52),
    )
    who = Identity("run-1", "learner-0", "learner", 1)
    server = LearnerServer(who, cast(Any, learner), cast(Any, None), cast(Any, None), lambda: still)
    return (await server.GetLearnerStatus(pb.GetLearnerStatusRequest(), cast(Any, None))).wait


async def test_a_step_that_makes_micro_batches_ends_by_itself() -> None:
    found = await _wait((3.0, 300.0))
    assert found.evidence == "learner-0 is training step 2 on 12 samples, for 52 s"
    assert "it ends by itself" in found.fix


async def test_a_learner_without_micro_batches_names_its_process_and_line() -> None:
    ends = threading.Event()

    def all_reduce() -> None:
        ends.wait(60)

    with ThreadPoolExecutor(1, thread_name_prefix=THREAD) as threads:
        threads.submit(all_reduce)
        try:
            found = await _wait((50.0, 300.0))
        finally:
            ends.set()
    words = f"its process {os.getpid()} has finished no micro-batch for 50 s, and is at test_status.py:"
    assert words in found.evidence and "(all_reduce)" in found.evidence
    assert f"`kill -9 {os.getpid()}` restarts it now; after 300 s (limits.stall_seconds)" in found.fix


@pytest.mark.parametrize("seen, still", [(None, 0.0), (7, 20.0)])
def test_the_watchdog_knows_how_long_nothing_was_done(seen: int | None, still: float) -> None:
    watchdog = Watchdog(300.0)
    watchdog.add("the learner finished no micro-batch of its step", lambda: seen)
    watchdog.check(10.0)
    watchdog.check(10.0)
    watchdog.check(10.0)
    assert watchdog.still == (still, 300.0)
