"""The watchdog ends a worker without progress, and no other."""

from __future__ import annotations

import threading
from collections.abc import Hashable

from rollout_workers.worker.watchdog import Watchdog


def watched(*seen: Hashable | None, limit: float = 3.0) -> str:
    """The reason after some observations, one second apart."""
    values = iter(seen)
    watchdog = Watchdog(limit)
    watchdog.add("nothing happened", lambda: next(values))
    why = ""
    for _ in seen:
        why = why or watchdog.check(1.0)
    return why


def test_no_progress_is_a_stall() -> None:
    assert watched(7, 7, 7, 7) == "nothing happened for 3 s (limits.stall_seconds = 3)"
    assert watched(7, 7, 7) == ""


def test_progress_and_idleness_start_over() -> None:
    assert watched(7, 7, 7, 8, 8, 8) == ""
    assert watched(7, 7, 7, None, 7, 7, 7) == ""
    assert watched(None, None, None, None, None) == ""


def test_an_observation_that_fails_is_no_stall() -> None:
    watchdog = Watchdog(1)
    watchdog.add("nothing happened", lambda: 1 // 0)
    assert not any(watchdog.check(1.0) for _ in range(5))


def test_the_thread_reports_the_stall() -> None:
    reported, reasons = threading.Event(), list[str]()

    def stalled(why: str) -> None:
        reasons.append(why)
        reported.set()

    watchdog = Watchdog(1, stalled)
    watchdog.add("nothing happened", lambda: 1)
    watchdog.start()
    assert reported.wait(30)
    assert reasons == ["nothing happened for 1 s (limits.stall_seconds = 1)"] or reasons[0].startswith("nothing happened for ")
