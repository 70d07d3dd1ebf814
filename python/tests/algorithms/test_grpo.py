"""GRPO's loss agrees with a token-by-token implementation written from the paper."""

from __future__ import annotations

import math

import pytest
import torch

from rollout_workers.algorithms.grpo import GrpoConfig, grpo
from rollout_workers.algorithms.surrogate import policy_loss as clipped_surrogate
from rollout_workers.algorithms.types import TokenBatch

N = 64


def random_batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Logprobs that differ enough that every branch of the clip is taken, in float64."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda scale: scale * torch.randn(N, generator=generator, dtype=torch.float64)  # noqa: E731
    logprobs = -1.5 + draw(0.5)
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs + draw(0.4),
        "engine_logprobs": logprobs + draw(0.6),
        "reference_logprobs": logprobs + draw(0.3),
        "advantages": draw(1.0),
    }


def by_loop(batch: dict[str, torch.Tensor], config: GrpoConfig, normalizer: float, on_policy: bool) -> float:
    """The loss token by token in plain floats."""
    total = 0.0
    for i in range(N):
        logprob, advantage = batch["logprobs"][i].item(), batch["advantages"][i].item()
        old = logprob if on_policy else batch["old_logprobs"][i].item()
        ratio = math.exp(logprob) / math.exp(old)
        low, high = 1 - config.clip_low, 1 + config.clip_high
        clipped = low if ratio < low else high if ratio > high else ratio
        objective = min(ratio * advantage, clipped * advantage)
        if config.off_policy:
            objective *= min(math.exp(old) / math.exp(batch["engine_logprobs"][i].item()), config.importance_cap)
        if config.kl_coefficient:
            p, q = logprob, batch["reference_logprobs"][i].item()
            kl = {"k1": p - q, "k2": 0.5 * (p - q) ** 2, "k3": math.exp(q) / math.exp(p) - (q - p) - 1}
            objective -= config.kl_coefficient * kl[config.kl_estimator]
        total -= objective
    return total / normalizer


CONFIGS = [
    GrpoConfig(),
    GrpoConfig(clip_low=0.1, clip_high=0.28),
    GrpoConfig(kl_coefficient=0.05),
    GrpoConfig(kl_coefficient=0.05, kl_estimator="k1"),
    GrpoConfig(kl_coefficient=0.05, kl_estimator="k2"),
    GrpoConfig(off_policy=True),
    GrpoConfig(off_policy=True, importance_cap=1.1, kl_coefficient=0.1),
]


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
@pytest.mark.parametrize("on_policy", [True, False])
def test_agrees_with_the_loop(config: GrpoConfig, on_policy: bool) -> None:
    batch = random_batch()
    given = {**batch, "old_logprobs": None if on_policy else batch["old_logprobs"]}
    found = clipped_surrogate(TokenBatch(normalizer=97.0, **given), config=config).loss
    assert found.item() == pytest.approx(by_loop(batch, config, 97.0, on_policy), rel=1e-9)


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_gradient_is_that_of_the_loop(config: GrpoConfig) -> None:
    """Central differences of the loop, with a fixed old policy."""
    batch = random_batch(1)
    leaf = batch["logprobs"].clone().requires_grad_()
    clipped_surrogate(TokenBatch(normalizer=97.0, **{**batch, "logprobs": leaf}), config=config).loss.backward()
    assert leaf.grad is not None
    for i in range(0, N, 7):
        step = torch.zeros(N, dtype=torch.float64)
        step[i] = 1e-6
        up, down = (by_loop({**batch, "logprobs": batch["logprobs"] + sign * step}, config, 97.0, False) for sign in (1, -1))
        assert leaf.grad[i].item() == pytest.approx((up - down) / 2e-6, rel=1e-5, abs=1e-9)


def test_on_policy_gradient_is_advantage_over_normalizer() -> None:
    batch = random_batch()
    leaf = batch["logprobs"].clone().requires_grad_()
    terms = clipped_surrogate(TokenBatch(logprobs=leaf, normalizer=10.0, advantages=batch["advantages"]), config=GrpoConfig())
    terms.loss.backward()
    assert leaf.grad is not None and torch.allclose(leaf.grad, -batch["advantages"] / 10.0)
    assert terms.sums["clip_fraction"].item() == 0


def test_engine_logprobs_never_enter_an_on_policy_loss() -> None:
    batch = random_batch()
    poisoned = {**batch, "engine_logprobs": torch.full((N,), torch.nan)}
    assert clipped_surrogate(TokenBatch(normalizer=1.0, **poisoned), config=GrpoConfig()).loss.isfinite()
    assert not grpo(GrpoConfig()).needs.engine_logprobs


def test_clip_fraction_counts_tokens_without_gradient() -> None:
    batch = random_batch()
    leaf = batch["logprobs"].clone().requires_grad_()
    terms = clipped_surrogate(TokenBatch(normalizer=1.0, **{**batch, "logprobs": leaf}), config=GrpoConfig())
    terms.loss.backward()
    assert terms.sums["clip_fraction"].item() == (leaf.grad == 0).sum().item() > 0


def test_the_parts_of_a_batch_add_up_to_the_whole() -> None:
    batch, config = random_batch(), GrpoConfig(kl_coefficient=0.1)
    whole = clipped_surrogate(TokenBatch(normalizer=float(N), **batch), config=config).loss
    parts = [
        clipped_surrogate(TokenBatch(normalizer=float(N), **{k: v[a:b] for k, v in batch.items()}), config=config).loss
        for a, b in ((0, 5), (5, 40), (40, N))
    ]
    assert torch.stack(parts).sum().item() == pytest.approx(whole.item(), rel=1e-12)


def test_what_is_needed_and_missing_is_named() -> None:
    batch = {**random_batch(), "reference_logprobs": None}
    with pytest.raises(ValueError, match="reference model"):
        clipped_surrogate(TokenBatch(normalizer=1.0, **batch), config=GrpoConfig(kl_coefficient=0.1))
    with pytest.raises(ValueError, match="kl_estimator 'k4' is unknown; take one of k1, k2, k3"):
        GrpoConfig(kl_estimator="k4")


@pytest.mark.parametrize(("coefficient", "needed"), [(0.0, False), (0.1, True)])
def test_reference_and_every_token_are_needed_only_for_the_divergence(coefficient: float, needed: bool) -> None:
    needs = grpo(GrpoConfig(kl_coefficient=coefficient)).needs
    assert (needs.reference, needs.every_token) == (needed, needed)


@pytest.mark.parametrize("clip", [{"clip_low": 0.0}, {"clip_high": 0.0}, {"clip_low": 0.0, "clip_high": 0.0}])
def test_a_clip_of_0_leaves_the_first_update_its_whole_gradient(clip: dict[str, float]) -> None:
    logprobs = torch.tensor([-1.0, -0.5, -2.0], requires_grad=True)
    batch = TokenBatch(logprobs=logprobs, normalizer=3.0, advantages=torch.tensor([1.5, -1.5, 0.0]))
    grpo(GrpoConfig(**clip)).loss(batch).loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.5, 0.5, 0.0]
