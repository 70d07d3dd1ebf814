"""Group-relative advantages against a loop over groups."""

from __future__ import annotations

import statistics

import pytest
import torch

from rollout_workers.algorithms.advantage import group_relative


def by_loop(rewards: list[float], groups: list[int], normalize_std: bool) -> list[float]:
    """The definition, applied to one sample at a time."""
    advantages = []
    for reward, group in zip(rewards, groups, strict=True):
        mates = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        advantage = reward - statistics.fmean(mates)
        if normalize_std:
            advantage /= (statistics.stdev(mates) if len(mates) > 1 else 0.0) + 1e-4
        advantages.append(advantage)
    return advantages


@pytest.mark.parametrize("normalize_std", [True, False])
def test_agrees_with_a_loop_on_interleaved_groups_of_any_size(normalize_std: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(40, generator=generator, dtype=torch.float64)
    groups = torch.tensor([0, 1, 2, 3] * 5 + [2] * 12 + [3] * 7 + [4])
    found = group_relative(rewards, groups, normalize_std=normalize_std)
    assert found.tolist() == pytest.approx(by_loop(rewards.tolist(), groups.tolist(), normalize_std), abs=1e-9)


def test_equal_rewards_give_exactly_zero_whatever_the_mean_rounds_to() -> None:
    rewards = torch.tensor([0.1] * 6 + [0.0, 1.0], dtype=torch.float64)
    found = group_relative(rewards, torch.tensor([0] * 6 + [1, 1]))
    assert found[:6].tolist() == [0.0] * 6
    assert found[6] == -found[7] != 0


def test_a_group_of_one_has_nothing_to_compare_with() -> None:
    assert group_relative(torch.tensor([3.0], dtype=torch.float64), torch.tensor([0])).tolist() == [0.0]
