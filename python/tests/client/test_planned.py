"""When a run makes no more progress by itself."""

from __future__ import annotations

import pytest

from rollout.client.planned import over
from rollout.run.v1.run_pb2 import Run, RunState


@pytest.mark.parametrize(
    ("state", "reason", "is_over"),
    [
        ("RUNNING", "", False),
        ("FAILED", "WORKER_CRASH_LOOP", True),
        ("PAUSED", "", False),
        ("PAUSED", "DISK_FULL", False),
        ("PAUSED", "EXPLODING_GRADIENT", True),
        ("PAUSED", "NON_FINITE_GRADIENT", True),
    ],
)
def test_a_run_is_over_if_it_makes_no_more_progress_by_itself(state: str, reason: str, is_over: bool) -> None:
    assert over(Run(state=RunState.Value(f"RUN_STATE_{state}"), reason=reason)) is is_over
