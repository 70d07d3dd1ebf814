"""Advantage estimators: turn the rewards of a batch into advantages of samples or tokens."""

from __future__ import annotations

import torch
from torch import Tensor

NORMALIZATIONS = ("group", "batch", "none")


def group_relative(
    rewards: Tensor,
    groups: Tensor,
    *,
    normalize_std: bool = True,
    normalization: str | None = None,
    epsilon: float = 1e-4,
) -> Tensor:
    """Advantage of each sample over the samples of its group: ``(r - mean) / (std + epsilon)``.

    DeepSeekMath (arXiv 2402.03300, section 4.1). ``std`` is the sample standard deviation (n - 1),
    of the group or, with normalization ``batch``, of all rewards (Lite PPO, arXiv 2508.08221); with
    ``none`` (or without ``normalize_std``) the mean alone is subtracted, as Dr. GRPO does (arXiv
    2503.20783). Groups may differ in size. A group whose rewards are all equal, or of one sample,
    gets exactly 0.

    rewards: float64 [S]. groups: int64 [S], 0 .. G-1, in any order. Returns float64 [S].
    """
    how = normalization or ("group" if normalize_std else "none")
    count = int(groups.max()) + 1 if groups.numel() else 0
    sizes = torch.bincount(groups, minlength=count).to(rewards.dtype)
    means = rewards.new_zeros(count).index_add_(0, groups, rewards) / sizes
    centered = rewards - means[groups]
    if how == "group":
        squares = rewards.new_zeros(count).index_add_(0, groups, centered.square())
        centered = centered / ((squares / (sizes - 1).clamp(min=1)).sqrt()[groups] + epsilon)
    elif how == "batch" and rewards.numel() > 1:
        centered = centered / (rewards.std() + epsilon)
    return centered.masked_fill(_all_equal(rewards, groups, count)[groups], 0.0)


def leave_one_out(rewards: Tensor, groups: Tensor, *, normalization: str = "none", epsilon: float = 1e-4) -> Tensor:
    """Advantage of each sample over the mean of the *other* samples of its group.

    RLOO (arXiv 2402.14740, section 3.3; Kool et al. 2019): that mean doesn't depend on the sample,
    so the estimate has no bias. It is ``group_relative`` without standard deviation, times ``n / (n
    - 1)``. ``normalization`` ``batch`` whitens the result over the batch, ``group`` divides by the
    standard deviation of the group's rewards. A group whose rewards are all equal, or of one
    sample, gets exactly 0 before any whitening.

    rewards: float64 [S]. groups: int64 [S]. Returns float64 [S].
    """
    sizes = torch.bincount(groups)[groups].to(rewards.dtype)
    scale = sizes / (sizes - 1).clamp(min=1)
    if normalization == "group":
        return group_relative(rewards, groups, epsilon=epsilon) * scale
    found = group_relative(rewards, groups, normalization="none") * scale
    if normalization == "batch" and found.numel() > 1:
        found = (found - found.mean()) / (found.std() + epsilon)
    return found


def whiten(values: Tensor, *, epsilon: float = 1e-8) -> Tensor:
    """``(x - mean) / sqrt(var + epsilon)`` over all of a batch's tokens; var divides by T - 1. One
    token gets 0.

    float64 [T] -> float64 [T].
    """
    centered = values - values.mean() if values.numel() else values
    if values.numel() < 2:
        return centered
    return centered * (centered.square().sum() / (values.numel() - 1) + epsilon).rsqrt()


def process_relative(
    token_rewards: Tensor,
    rewards: Tensor,
    sample: Tensor,
    groups: Tensor,
    *,
    normalize_std: bool,
    penalty: Tensor | None = None,
    epsilon: float = 1e-4,
) -> Tensor:
    """Advantages from process rewards: each reward relative to all of its group's, summed from the
    token on.

    DeepSeekMath, arXiv 2402.03300, section 4.1.3. A token has a process reward where its
    ``token_rewards`` is not 0; a step that earned 0 has one that is next to it
    (``process_reward.NOTHING``). The outcome reward of a sample counts as one more, at its last
    token, in each group of which one is not 0: a wrong answer is then below a right one with the
    same steps. A group whose process rewards are all equal gets 0.

    penalty: what is taken from the rewards at each token, from the process reward that follows;
    what follows the last, from that. token_rewards, penalty: float64 [T]. rewards: float64 [S].
    sample: int64 [T], ascending. groups: int64 [S]. Returns float64 [T].
    """
    scores = add_at_end(token_rewards, rewards, sample)
    rewarded = torch.zeros_like(rewards).index_add_(0, groups, (rewards != 0).to(rewards.dtype)) > 0  # by group
    places = ((scores != 0) | (add_at_end(torch.zeros_like(scores), rewarded[groups].to(scores.dtype), sample) != 0)).nonzero()[
        :, 0
    ]
    relative = torch.zeros_like(scores)
    if penalty is not None and places.numel():
        following = torch.searchsorted(places, torch.arange(len(scores))).clamp(max=len(places) - 1)
        at = torch.where(sample[places[following]] == sample, following, (following - 1).clamp(min=0))
        own = sample[places[at]] == sample  # otherwise, for a sample without a process reward
        scores = scores.index_add(0, places[at[own]], -penalty[own])
    relative[places] = group_relative(scores[places], groups[sample[places]], normalize_std=normalize_std, epsilon=epsilon)
    return sum_from_here(relative, sample)


def add_at_end(per_token: Tensor, per_sample: Tensor, sample: Tensor) -> Tensor:
    """Add a value of each sample at its last token. The values of samples without tokens are lost.

    per_token: float64 [T]. per_sample: float64 [S]. sample: int64 [T], ascending. Returns float64
    [T].
    """
    if not sample.numel():
        return per_token
    last = torch.ones_like(sample, dtype=torch.bool)
    last[:-1] = sample[1:] != sample[:-1]
    return per_token + torch.where(last, per_sample[sample], 0.0)


def sum_from_here(per_token: Tensor, sample: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Discounted sum from each token to the end of its sample. float64 [T], int64 [T] -> float64
    [T]; ``sample`` ascends."""
    out, running, ids = per_token.clone(), 0.0, sample.tolist()
    values = per_token.tolist()
    for place in range(len(values) - 1, -1, -1):
        if place + 1 < len(values) and ids[place] != ids[place + 1]:
            running = 0.0
        running = values[place] + gamma * running
        out[place] = running
    return out


def equal_groups(rewards: Tensor, groups: Tensor) -> Tensor:
    """Whether all rewards of each sample's group are equal; true for a group with one sample.
    float64 [S], int64 [S] -> bool [S]."""
    return _all_equal(rewards, groups, int(groups.max()) + 1 if groups.numel() else 0)[groups]


def _all_equal(rewards: Tensor, groups: Tensor, count: int) -> Tensor:
    """bool [G]: whether a group's rewards are the same number. Compared, since a rounded mean
    leaves a residue."""
    highest = rewards.new_full((count,), -torch.inf).scatter_reduce_(0, groups, rewards, "amax")
    lowest = rewards.new_full((count,), torch.inf).scatter_reduce_(0, groups, rewards, "amin")
    return highest == lowest
