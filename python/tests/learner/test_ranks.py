"""The rank of a process, and how rank 0 detects that other ranks exit."""

from __future__ import annotations

import os
import signal
from queue import Queue

import pytest

from rollout.config.v1.run_config_pb2 import LimitsConfig, RunConfig, TrainConfig
from rollout_workers.learner.ranks import Place, RanksMismatch, Team, place


def config(ranks: int) -> RunConfig:
    """The config of a plan with the given number of ranks."""
    return RunConfig(train=TrainConfig(ranks=ranks), limits=LimitsConfig(rank_timeout_seconds=30))


def test_the_rank_comes_from_torchrun() -> None:
    assert place(RunConfig(), {}) == Place(0, 1, "", 600.0)
    assert place(config(2), {}) == Place(0, 2, "", 30.0)
    assert place(config(2), {"RANK": "1", "WORLD_SIZE": "2"}) == Place(1, 2, "env://", 30.0)
    with pytest.raises(RanksMismatch, match=r"torchrun started 4 ranks, but the plan has `train.ranks` = 2"):
        place(config(2), {"RANK": "0", "WORLD_SIZE": "4"})


def test_an_unexpected_exit_of_a_rank_is_reported_but_not_a_requested_one() -> None:
    reports: Queue[str] = Queue()
    team = Team(config(3), reports.put)
    first, second = team._processes
    os.kill(first.pid, signal.SIGKILL)
    assert reports.get(timeout=60) == "rank 1 of the learner was killed by SIGKILL; the learner restarts from its last state"
    team.close()
    assert second.returncode == -signal.SIGKILL and reports.empty()
