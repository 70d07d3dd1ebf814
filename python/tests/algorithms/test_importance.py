"""Importance weights: truncated, masked, of tokens and of samples; the staleness of a batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rollout_workers.algorithms import CispoConfig, GrpoConfig, RlooConfig, TokenBatch
from rollout_workers.algorithms.cispo import cispo
from rollout_workers.algorithms.grpo import grpo
from rollout_workers.algorithms.importance import importance_weights, staleness_histogram
from rollout_workers.algorithms.rloo import rloo
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


COUNTS = [1, 4, 7, 2, 12]


def disagreeing() -> tuple[dict[str, Any], NDArray[np.int64]]:
    """Five samples whose engine and learner disagree, some of them much; and the sample of each
    token."""
    draw = np.random.default_rng(5)
    sample = np.repeat(np.arange(len(COUNTS)), COUNTS)
    old = draw.normal(-1.5, 0.4, len(sample))
    engine = old - draw.normal(0.0, 0.5, len(sample)) - np.array([2.5, 0.05, 0.3, -1.0, -0.02])[sample]
    return {
        "logprobs": old + draw.normal(0.0, 0.3, len(sample)),
        "old_logprobs": old,
        "engine_logprobs": engine,
        "advantages": draw.normal(0.0, 1.0, len(sample)),
    }, sample


def icepop(ratio: NDArray[np.float64], _: NDArray[np.int64]) -> NDArray[np.float64]:
    """arXiv 2510.18855: M(k) = k if alpha <= k <= beta, else 0."""
    return np.where((ratio >= 0.5) & (ratio <= 5.0), ratio, 0.0)


def masked_sequences(ratio: NDArray[np.float64], sample: NDArray[np.int64]) -> NDArray[np.float64]:
    """MIS alone: 1 if the product over the sample is at most 2, else 0."""
    products = np.array([ratio[sample == number].prod() for number in range(len(COUNTS))])
    return np.where(products <= 2.0, 1.0, 0.0)[sample]


def weighted_sequences(ratio: NDArray[np.float64], sample: NDArray[np.int64]) -> NDArray[np.float64]:
    """MIS with its weight: the product over the sample if it is at most 2, else 0."""
    products = np.array([ratio[sample == number].prod() for number in range(len(COUNTS))])
    return np.where(products <= 2.0, products, 0.0)[sample]


def geometric_and_truncated(ratio: NDArray[np.float64], sample: NDArray[np.int64]) -> NDArray[np.float64]:
    """Samples by their geometric mean, tokens truncated at 1.5."""
    means = np.array([ratio[sample == number].prod() ** (1 / count) for number, count in enumerate(COUNTS)])
    return np.where((means >= 0.8) & (means <= 1.25), 1.0, 0.0)[sample] * np.minimum(ratio, 1.5)


MASKS: list[tuple[str, dict[str, Any], Callable[..., NDArray[np.float64]]]] = [
    ("icepop", {"importance_correction": "mask", "importance_cap": 5.0}, icepop),
    (
        "MIS alone",
        {"importance_correction": "none", "importance_sample_mask": "sequence"},
        masked_sequences,
    ),
    (
        "MIS",
        {"importance_correction": "mask", "importance_level": "sequence", "importance_floor": 0.0},
        weighted_sequences,
    ),
    (
        "geometric",
        {
            "importance_cap": 1.5,
            "importance_sample_mask": "geometric",
            "importance_sample_cap": 1.25,
            "importance_sample_floor": 0.8,
        },
        geometric_and_truncated,
    ),
]


@pytest.mark.parametrize(("settings", "weigh"), [case[1:] for case in MASKS], ids=[case[0] for case in MASKS])
def test_masks_agree_with_a_direct_evaluation(settings: dict[str, Any], weigh: Callable[..., NDArray[np.float64]]) -> None:
    """Loss, gradient, and the shares of masked tokens and samples, in numpy from the formulas."""
    batch, sample = disagreeing()
    weights = weigh(np.exp(batch["old_logprobs"] - batch["engine_logprobs"]), sample)
    assert 0 < (weights == 0).sum() < len(sample)
    r, a = np.exp(batch["logprobs"] - batch["old_logprobs"]), batch["advantages"]
    clipped = np.clip(r, 0.8, 1.2)
    wanted = -(np.minimum(r * a, clipped * a) * weights).sum() / 97.0
    slope = np.where(((r < 0.8) & (a < 0)) | ((r > 1.2) & (a > 0)), 0.0, -r * a * weights) / 97.0
    tensors: dict[str, Any] = {name: torch.from_numpy(values) for name, values in batch.items()}
    tensors["logprobs"].requires_grad_()
    found = policy_loss(
        TokenBatch(normalizer=97.0, sample=torch.from_numpy(sample), **tensors), config=GrpoConfig(off_policy=True, **settings)
    )
    found.loss.backward()
    assert found.loss.item() == pytest.approx(wanted, rel=1e-9)
    assert tensors["logprobs"].grad is not None
    assert tensors["logprobs"].grad.tolist() == pytest.approx(slope.tolist(), rel=1e-9, abs=1e-12)
    assert found.sums["importance/masked"].item() == (weights == 0).sum()
    if "importance_sample_mask" in settings:
        share, samples = found.shares["importance/masked_samples"]
        assert (share.item(), samples) == (pytest.approx(len(set(sample[weights == 0]))), len(COUNTS))


@pytest.mark.parametrize("old_policy", ["proximal", "engine"])
def test_samples_are_left_out_with_either_old_policy(old_policy: str) -> None:
    batch, sample = disagreeing()
    tensors: dict[str, Any] = {name: torch.from_numpy(values) for name, values in batch.items()}
    tensors["logprobs"].requires_grad_()
    config = GrpoConfig(off_policy=True, old_policy=old_policy, importance_sample_mask="sequence", clip_low=1.0, clip_high=100.0)
    policy_loss(TokenBatch(normalizer=1.0, sample=torch.from_numpy(sample), **tensors), config=config).loss.backward()
    assert tensors["logprobs"].grad is not None
    out = masked_sequences(np.exp(batch["old_logprobs"] - batch["engine_logprobs"]), sample) == 0
    assert (tensors["logprobs"].grad.numpy() == 0).tolist() == out.tolist()


def test_on_policy_no_sample_is_left_out() -> None:
    config = GrpoConfig(importance_sample_mask="sequence")
    terms = policy_loss(TokenBatch(logprobs=PROXIMAL, normalizer=3.0, advantages=torch.ones(3), sample=SAMPLE), config=config)
    assert not terms.shares and not grpo(config).needs.engine_logprobs
    assert grpo(dataclasses.replace(config, off_policy=True, importance_correction="none")).needs.engine_logprobs


def test_a_completion_of_rloo_is_weighed_once() -> None:
    """A whole completion is one action: its term is A q min(product of its importance ratios, cap),
    however many tokens it has."""
    batch, sample = disagreeing()
    advantages = np.array([0.5, -1.0, 2.0, 1.0, -0.25])
    tensors: dict[str, Any] = {name: torch.from_numpy(values) for name, values in batch.items()}
    tensors |= {"advantages": torch.from_numpy(advantages[sample]), "logprobs": tensors["logprobs"].requires_grad_()}
    config = RlooConfig(off_policy=True, clip_low=1.0, clip_high=100.0)
    tokens = TokenBatch(normalizer=1.0, samples=5.0, sample=torch.from_numpy(sample), **tensors)
    rloo(config).loss(tokens).loss.backward()

    def total(name: str, over: str, number: int) -> float:
        return float(np.exp((batch[name] - batch[over])[sample == number].sum()))

    wanted = [
        -advantages[n] * total("logprobs", "old_logprobs", n) * min(total("old_logprobs", "engine_logprobs", n), 2.0) / 5
        for n in range(5)
    ]
    assert tensors["logprobs"].grad is not None
    assert tensors["logprobs"].grad.tolist() == pytest.approx(np.array(wanted)[sample].tolist(), rel=1e-9)


@pytest.mark.parametrize("updates", [1, 4])
def test_the_ratio_of_cispo_is_to_the_policy_that_sampled(updates: int) -> None:
    """Off policy the weight of a token's gradient is A clip(p / p_engine), also in the first
    update."""
    batch, sample = disagreeing()
    tensors: dict[str, Any] = {name: torch.from_numpy(values) for name, values in batch.items()}
    tensors["logprobs"].requires_grad_()
    if updates == 1:
        del tensors["old_logprobs"]
    algorithm = cispo(CispoConfig(off_policy=True, clip_high=1.0, epochs=updates))
    assert algorithm.needs.engine_logprobs
    algorithm.loss(TokenBatch(normalizer=97.0, sample=torch.from_numpy(sample), **tensors)).loss.backward()
    ratio = np.exp(batch["logprobs"] - batch["engine_logprobs"])
    assert (ratio > 2).any() and (ratio < 2).any()
    assert tensors["logprobs"].grad is not None
    wanted = -batch["advantages"] * np.minimum(ratio, 2.0) / 97.0
    assert tensors["logprobs"].grad.tolist() == pytest.approx(wanted.tolist(), rel=1e-9)
