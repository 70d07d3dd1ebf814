"""Importance weights: truncated, masked, of tokens and of samples; the staleness of a batch."""

from __future__ import annotations

import math

import pytest
import torch

from rollout_workers.algorithms import GrpoConfig, TokenBatch
from rollout_workers.algorithms.importance import importance_weights, staleness_histogram
from rollout_workers.algorithms.surrogate import policy_loss

SAMPLE = torch.tensor([0, 0, 1])
PROXIMAL, BEHAVIOUR = torch.tensor([-1.0, -1.0, -3.0]), torch.tensor([-1.5, -1.25, -1.0])
CAPS = {"cap": 1.5, "floor": 0.5}


def test_the_ratio_is_capped_above_and_only_there() -> None:
    weights = importance_weights(
        torch.tensor([-1.0, -1.0, -1.0, -9.0]),
        torch.tensor([-1.5, -1.0, -6.0, 0.0]),
        None,
        correction="truncate",
        level="token",
        **CAPS,
    )
    assert weights.tolist() == pytest.approx([1.5, 1.0, 1.5, 1.2341e-4], rel=1e-4)


@pytest.mark.parametrize("correction", ["truncate", "mask"])
def test_the_weight_is_a_constant_for_the_gradient(correction: str) -> None:
    proximal = PROXIMAL.clone().requires_grad_()
    assert not importance_weights(proximal, BEHAVIOUR, SAMPLE, correction=correction, level="token", **CAPS).requires_grad


@pytest.mark.parametrize(
    ("level", "correction", "wanted"),
    [
        ("token", "truncate", [1.5, math.exp(0.25), math.exp(-2)]),
        ("token", "mask", [0, math.exp(0.25), 0]),
        ("sequence", "truncate", [1.5, 1.5, math.exp(-2)]),
        ("sequence", "mask", [0, 0, 0]),
        ("geometric", "truncate", [math.exp(0.375), math.exp(0.375), math.exp(-2)]),
        ("geometric", "mask", [math.exp(0.375), math.exp(0.375), 0]),
        ("token", "none", [1, 1, 1]),
    ],
)
def test_levels(level: str, correction: str, wanted: list[float]) -> None:
    found = importance_weights(PROXIMAL, BEHAVIOUR, SAMPLE, correction=correction, level=level, **CAPS)
    assert found.tolist() == pytest.approx(wanted)


def test_levels_above_the_token_need_the_sample_index() -> None:
    with pytest.raises(ValueError, match="level 'sequence' need the sample of each token"):
        importance_weights(PROXIMAL, BEHAVIOUR, None, correction="truncate", level="sequence", **CAPS)


def test_with_the_engine_as_old_policy_the_clip_bounds_the_whole_step() -> None:
    """No importance weight is used: the ratio is relative to the behavior policy."""
    tokens = TokenBatch(
        logprobs=PROXIMAL, normalizer=3.0, advantages=torch.ones(3), old_logprobs=torch.zeros(3), engine_logprobs=BEHAVIOUR
    )
    found = policy_loss(tokens, config=GrpoConfig(off_policy=True, old_policy="engine"))
    assert found.loss.item() == pytest.approx(-(1.2 + 1.2 + math.exp(-2)) / 3)
    assert "importance/weight" not in found.sums


def test_the_correction_is_measured() -> None:
    tokens = TokenBatch(
        logprobs=PROXIMAL, normalizer=3.0, advantages=torch.ones(3), old_logprobs=PROXIMAL, engine_logprobs=BEHAVIOUR
    )
    sums = policy_loss(tokens, config=GrpoConfig(off_policy=True, importance_cap=1.5)).sums
    assert sums["importance/weight"].item() == pytest.approx(1.5 + math.exp(0.25) + math.exp(-2))
    assert sums["importance/bounded"].item() == 1


def test_staleness_falls_into_buckets() -> None:
    found = staleness_histogram([0, 0, 1, 2, 3, 4, 7, 9, 30, -1])
    assert found == {
        f"staleness/share_{start}": share for start, share in ((0, 0.3), (1, 0.1), (2, 0.1), (3, 0.2), (5, 0.1), (9, 0.2))
    }
    assert staleness_histogram([]) == {}
