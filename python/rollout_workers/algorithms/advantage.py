"""Advantage estimators: from the rewards of a batch's samples to how much better than expected each was."""

from __future__ import annotations

import torch
from torch import Tensor


def group_relative(rewards: Tensor, groups: Tensor, *, normalize_std: bool = True, epsilon: float = 1e-4) -> Tensor:
    """Advantage of each sample over the samples of its own group: ``(r - mean) / (std + epsilon)``.

    DeepSeekMath (arXiv 2402.03300, section 4.1). ``std`` is the sample standard deviation (n - 1); without
    ``normalize_std`` the mean alone is subtracted, as Dr. GRPO does (arXiv 2503.20783). Groups may differ in size. A group
    whose rewards are all equal, or of one sample, gets exactly 0.

    rewards: float64 [S]. groups: int64 [S], 0 .. G-1, in any order. Returns float64 [S].
    """
    count = int(groups.max()) + 1 if groups.numel() else 0
    sizes = torch.bincount(groups, minlength=count).to(rewards.dtype)
    means = rewards.new_zeros(count).index_add_(0, groups, rewards) / sizes
    centered = rewards - means[groups]
    if normalize_std:
        squares = rewards.new_zeros(count).index_add_(0, groups, centered.square())
        centered = centered / ((squares / (sizes - 1).clamp(min=1)).sqrt()[groups] + epsilon)
    return centered.masked_fill(_all_equal(rewards, groups, count)[groups], 0.0)


def _all_equal(rewards: Tensor, groups: Tensor, count: int) -> Tensor:
    """bool [G]: whether a group's rewards are the same number. Compared, since a rounded mean leaves a residue."""
    highest = rewards.new_full((count,), -torch.inf).scatter_reduce_(0, groups, rewards, "amax")
    lowest = rewards.new_full((count,), torch.inf).scatter_reduce_(0, groups, rewards, "amin")
    return highest == lowest
