"""Groups of different sizes: each estimate equals a plain computation over the samples left."""

from __future__ import annotations

import statistics

import pytest
import torch

from rollout_workers.algorithms.advantage import group_relative, leave_one_out

REWARDS = [[1.0, 0.0, 0.5, 2.0], [3.0, 1.0], [1.0, 0.0, 4.0]]
FLAT = torch.tensor([reward for group in REWARDS for reward in group], dtype=torch.float64)
GROUPS = torch.tensor([at for at, group in enumerate(REWARDS) for _ in group])


def test_group_relative() -> None:
    wanted = [(r - statistics.mean(g)) / (statistics.stdev(g) + 1e-4) for g in REWARDS for r in g]
    assert group_relative(FLAT, GROUPS).tolist() == pytest.approx(wanted)


def test_leave_one_out() -> None:
    wanted = [r - (sum(g) - r) / (len(g) - 1) for g in REWARDS for r in g]
    assert leave_one_out(FLAT, GROUPS).tolist() == pytest.approx(wanted)


def test_a_group_of_one_sample_has_advantage_0() -> None:
    alone = torch.tensor([5.0], dtype=torch.float64)
    assert group_relative(alone, torch.tensor([0])).tolist() == leave_one_out(alone, torch.tensor([0])).tolist() == [0.0]
