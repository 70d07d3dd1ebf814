"""Advantages, penalties, and coefficients equal values computed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout.plugin import Step
from rollout_workers.algorithms import EstimatorBatch, Needs, Updates, build_algorithm, config_type
from rollout_workers.algorithms.advantage import add_at_end, equal_groups, group_relative, leave_one_out, sum_from_here, whiten
from rollout_workers.algorithms.divergence import adapted_coefficient, k3
from rollout_workers.algorithms.kto import mismatch, reference_point
from rollout_workers.algorithms.ppo import gae
from rollout_workers.rewards.process_reward import spread

D = torch.float64
SAMPLE = torch.tensor([0, 0, 0, 2, 2])  # three samples, the second without a token


def of(*values: float) -> Tensor:
    return torch.tensor(values, dtype=D)


def build(name: str, **settings: Any) -> Any:
    return build_algorithm(name, config_type(name)(**settings))


def batch(**given: Any) -> EstimatorBatch:
    return EstimatorBatch(**{"rewards": of(1, 5, 3), "groups": torch.tensor([0, 0, 0]), "sample": SAMPLE, **given})


def test_leave_one_out_compares_with_the_others() -> None:
    assert leave_one_out(of(1, 2, 6, 4), torch.tensor([0, 0, 0, 1])).tolist() == pytest.approx([-3, -1.5, 4.5, 0])
    assert leave_one_out(of(7, 7), torch.tensor([0, 0])).tolist() == [0, 0]
    batchwise = leave_one_out(of(1, 2, 6), torch.tensor([0, 0, 0]), normalization="batch")
    assert batchwise.mean().item() == pytest.approx(0, abs=1e-12) and batchwise.std().item() == pytest.approx(1, rel=1e-3)


def test_normalization_over_the_batch_uses_one_deviation() -> None:
    found = group_relative(of(0, 2, 0, 6), torch.tensor([0, 0, 1, 1]), normalization="batch")
    deviation = math.sqrt((4 + 0 + 4 + 16) / 3) + 1e-4  # of 0, 2, 0, 6 around their mean 2
    assert found.tolist() == pytest.approx([-1 / deviation, 1 / deviation, -3 / deviation, 3 / deviation])


def test_equal_groups() -> None:
    assert equal_groups(of(1, 1, 0, 1, 5), torch.tensor([0, 0, 1, 1, 2])).tolist() == [True, True, False, False, True]


def test_sums_to_the_end_stop_at_the_sample() -> None:
    assert sum_from_here(of(1, 2, 3, 4, 5), SAMPLE, gamma=0.5).tolist() == [1 + 1 + 0.75, 2 + 1.5, 3, 4 + 2.5, 5]
    assert add_at_end(of(0, 0, 0, 0, 0), of(1, 5, 3), SAMPLE).tolist() == [0, 0, 1, 0, 3]


def test_gae_by_hand() -> None:
    """gamma 0.5, lambda 0.5: deltas are r + 0.5 V' - V, each worth a quarter of the next."""
    found = gae(of(0, 0, 1, 0, 3), of(1, 2, 4, 2, 1), SAMPLE, gamma=0.5, gae_lambda=0.5)
    third, second, first = 1 - 4.0, 0 + 2.0 - 2.0, 0 + 1.0 - 1.0
    fifth, fourth = 3 - 1.0, 0 + 0.5 - 2.0
    assert found.tolist() == pytest.approx(
        [first + (second + third / 4) / 4, second + third / 4, third, fourth + fifth / 4, fifth]
    )


def test_gae_ends_are_the_return_and_one_step() -> None:
    rewards, values = of(0, 0, 1, 0, 3), of(1, 2, 4, 2, 1)
    assert gae(rewards, values, SAMPLE, gamma=1.0, gae_lambda=1.0).tolist() == pytest.approx([0, -1, -3, 1, 2])
    assert gae(rewards, values, SAMPLE, gamma=1.0, gae_lambda=0.0).tolist() == pytest.approx([1, 2, -3, -1, 2])


def test_whitening_one_token_or_equal_ones_gives_zero() -> None:
    assert whiten(of(3.0)).tolist() == [0] and whiten(of()).tolist() == []
    assert whiten(of(0.1, 0.1, 0.1)).abs().max() < 1e-9


def test_process_rewards_are_relative_to_those_of_the_group_and_summed_from_the_token_on() -> None:
    """Rewards of steps: 1 and 3 of the first sample (at its places 0 and 2), 5 of the third (at its
    end)."""
    algorithm = build("grpo")
    found = algorithm.estimate(batch(rewards=of(0, 0, 0), token_rewards=of(1, 0, 3, 0, 5)))
    step = 2 / (2 + 1e-4)  # the steps' mean is 3, their deviation 2
    assert found.advantages.tolist() == pytest.approx([-step, 0, 0, step, step])


def test_the_outcome_reward_counts_as_a_process_reward() -> None:
    with_outcome = build("grpo").estimate(batch(rewards=of(3, 0, 5), token_rewards=of(1, 0, 0, 0, 0))).advantages
    assert (
        with_outcome.tolist()
        == build("grpo").estimate(batch(rewards=of(0, 0, 0), token_rewards=of(1, 0, 3, 0, 5))).advantages.tolist()
    )


def test_an_outcome_of_0_counts_if_the_group_has_another_outcome() -> None:
    """Both samples made the same step, worth 1; the first answer is right, the second wrong."""
    given = {"groups": torch.tensor([0, 0]), "sample": torch.tensor([0, 0, 1, 1]), "token_rewards": of(1, 0, 1, 0)}
    found = build("grpo").estimate(batch(rewards=of(1, 0), **given)).advantages
    scale = 1 / (0.5 + 1e-4)  # of 1, 1, 1, 0
    assert found.tolist() == pytest.approx([0.5 * scale, 0.25 * scale, -0.5 * scale, -0.75 * scale])
    assert build("grpo").estimate(batch(rewards=of(0, 0), **given)).advantages.tolist() == [0, 0, 0, 0]


def test_a_step_with_reward_0_counts_in_its_group() -> None:
    """Two samples with steps of 1 and 1, and of 0 and 0: their advantages have opposite signs and
    the same size."""
    right, wrong = ([Step(n, n + 1, reward) for n in range(2)] for reward in (1.0, 0.0))
    token_rewards = of(*(r for steps in (right, wrong) for r in spread(steps, 2, lambda tokens: "x" * tokens)))
    found = build("grpo").estimate(
        batch(rewards=of(0, 0), groups=torch.tensor([0, 0]), sample=torch.tensor([0, 0, 1, 1]), token_rewards=token_rewards)
    )
    step = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert found.advantages.tolist() == pytest.approx([2 * step, step, -2 * step, -step])


def test_a_divergence_in_the_reward_lowers_the_process_reward_that_follows() -> None:
    """Rewards of 1 and 3 at the places 1 and 2, of 5 at 3; what the token at 4 costs is taken from
    the last before it."""
    given = {"rewards": of(0, 0, 0), "logprobs": of(-1, -1, -1, -2, -2), "reference_logprobs": of(-2, -2, -1, -2, -1)}
    lowered = build("grpo", kl_coefficient=0.5, kl_in="reward", kl_estimator="k1")
    found = lowered.estimate(batch(token_rewards=of(0, 1, 3, 5, 0), **given))  # k1: 1, 1, 0 and 0, -1
    plain = build("grpo").estimate(
        batch(rewards=of(0, 0, 0), token_rewards=of(0, 1 - 0.5 * 2, 3, 5 + 0.5, 0) + of(0, 1e-30, 0, 0, 0))
    )
    assert found.advantages.tolist() == pytest.approx(plain.advantages.tolist())
    nowhere = build("grpo", kl_coefficient=1e-12, kl_in="reward", kl_estimator="k1")
    unmoved = build("grpo").estimate(batch(rewards=of(0, 0, 0), token_rewards=of(1, 0, 3, 0, 0)))
    almost = nowhere.estimate(batch(token_rewards=of(1, 0, 3, 0, 0), **given))  # the third sample has none
    assert almost.advantages.tolist() == pytest.approx(unmoved.advantages.tolist())


def test_a_divergence_in_the_reward_is_summed_over_the_sample() -> None:
    algorithm = build("rloo", kl_coefficient=0.5)
    found = algorithm.estimate(batch(logprobs=of(-1, -1, -1, -2, -2), reference_logprobs=of(-2, -2, -1, -2, -1)))
    rewards = [1 - 0.5 * 2, 5, 3 + 0.5 * 1]  # k1: log-ratios 1, 1, 0 and 0, -1
    wanted = [rewards[0] - (5 + 3.5) / 2, rewards[2] - (0 + 5) / 2]
    assert found.advantages.tolist() == pytest.approx([wanted[0]] * 3 + [wanted[1]] * 2)
    assert found.metrics["kl/reference"] == pytest.approx(1 / 5)
    assert algorithm.advantages is None and algorithm.needs.old_logprobs and algorithm.needs.reference
    lower = algorithm.estimate(
        batch(logprobs=of(-1, -1, -1, -2, -2), reference_logprobs=of(-2, -2, -1, -2, -1), kl_coefficient=0.0)
    )
    assert lower.advantages.tolist() == pytest.approx([1 - 4] * 3 + [3 - 3] * 2)


def test_the_overlong_penalty_falls_linearly_over_the_last_share() -> None:
    shape = build("dapo", max_tokens=100, overlong_share=0.2, overlong_penalty=2.0).shape
    lengths, cut = torch.tensor([10, 80, 90, 100, 40]), torch.tensor([False, False, False, False, True])
    assert shape(of(1, 1, 1, 1, 1), lengths, cut).tolist() == pytest.approx([1, 1, 0, -1, -1])
    assert build("grpo").shape is None


@pytest.mark.parametrize("distance", [0.0, 1.0, 19.0, 21.0, 60.0])
def test_k3_keeps_a_gradient_for_a_distant_policy(distance: float) -> None:
    """The gradient points to the reference and is constant beyond e^20. This also holds for tokens
    that only the policy samples."""
    for away, slope in ((distance, -math.expm1(min(distance, 20.0))), (-distance, -math.expm1(-distance))):
        logprobs = torch.tensor([-1.0 - away]).requires_grad_()
        value = k3(logprobs, torch.tensor([-1.0]))
        value.backward()
        beyond = max(0.0, away - 20)
        wanted = math.expm1(away - beyond) - (away - beyond) + math.expm1(20) * beyond
        assert value.item() == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        assert logprobs.grad is not None and logprobs.grad.item() == pytest.approx(slope, rel=1e-5, abs=1e-6)


def test_the_kl_controller_moves_by_a_fifth_at_most() -> None:
    assert adapted_coefficient(0.1, 9.0, 100, target=0.5, horizon=1000) == pytest.approx(0.1 * 1.02)
    assert adapted_coefficient(0.1, 0.0, 100, target=0.5, horizon=1000) == pytest.approx(0.1 * 0.98)
    assert adapted_coefficient(0.1, 0.55, 100, target=0.5, horizon=1000) == pytest.approx(0.1 * 1.01)
    for samples in (1000, 10_000):  # a step of more samples than the horizon
        assert adapted_coefficient(0.1, 0.0, samples, target=0.5, horizon=1000) == pytest.approx(0.08)
        assert adapted_coefficient(0.1, 9.0, samples, target=0.5, horizon=1000) == pytest.approx(0.12)
    controlled = build("ppo", kl_target=0.5, kl_horizon=1000.0)
    assert controlled.next_kl_coefficient(0.1, 9.0, 100) == pytest.approx(0.1 * 1.02)
    assert build("ppo").next_kl_coefficient is None and controlled.initial_kl_coefficient == 0.05


def test_ktos_reference_point_is_a_mean_that_is_never_negative() -> None:
    assert reference_point(of(-3, -2), of(-4, -4)) == 1.5
    assert reference_point(of(-5, -5), of(-4, -4)) == 0 == reference_point(of(), of())
    assert mismatch("abcd") == [3, 0, 1, 2] and mismatch("a") == [0]
    assert mismatch("aabbcc") == [5, 5, 1, 1, 3, 3] and mismatch("aa") == [1, 0]  # pairs


NEEDS = {
    "sft": Needs(),
    "dpo": Needs(reference=True),
    "kto": Needs(reference=True, mismatched=True),
    "reward_model": Needs(score_head=True),
    "dr_grpo": Needs(sampled=True, group_rewards=True, every_token=False),
    "gspo": Needs(sampled=True, group_rewards=True, old_logprobs=True, every_token=False),
    "ppo": Needs(sampled=True, reference=True, old_logprobs=True, critic=True),
    "distillation": Needs(sampled=True, teacher=True),
    "online_dpo": Needs(sampled=True, group_rewards=True, reference=True),
}


@pytest.mark.parametrize("name", NEEDS)
def test_needs(name: str) -> None:
    settings = {"max_tokens": 8} if name == "dr_grpo" else {}
    assert build(name, **settings).needs == NEEDS[name]


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({"off_policy": True}, True),
        ({"off_policy": True, "importance_correction": "none"}, False),
        ({"off_policy": True, "importance_correction": "none", "old_policy": "engine"}, True),
        ({"old_policy": "engine"}, False),
    ],
)
def test_engine_logprobs_are_needed_off_policy_alone(settings: dict[str, Any], needed: bool) -> None:
    assert build("grpo", **settings).needs.engine_logprobs is needed


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("grpo", {"reduction": "sample"}, "reduction 'sample' is unknown; take one of token, sequence, constant"),
        ("grpo", {"normalization": "all"}, "normalization 'all' is unknown"),
        ("grpo", {"baseline": "mean"}, "baseline 'mean' is unknown"),
        ("grpo", {"reduction": "constant"}, "need max_tokens"),
        ("grpo", {"overlong_share": 0.5}, "need max_tokens"),
        ("grpo", {"epochs": 0}, r"epochs \(0\) and minibatches \(1\)"),
        ("ppo", {"dual_clip": 1.0}, "dual_clip 1.0 must be above 1"),
        ("ppo", {"critic": "tail"}, "critic 'tail' is unknown; take one of head, network"),
        ("ppo", {"importance_level": "word"}, "importance_level 'word' is unknown"),
        ("ppo", {"old_policy": "older"}, "old_policy 'older' is unknown"),
        ("dpo", {"beta": 0.0}, "beta 0.0 must be above 0"),
        ("dpo", {"label_smoothing": 0.5}, "label_smoothing 0.5"),
        ("kto", {"desirable_weight": -1.0}, "must not be below 0"),
        ("distillation", {"minibatches": 0}, "minibatches"),
        ("online_dpo", {"loss": "hinge"}, "loss 'hinge' is unknown"),
        ("online_dpo", {"beta": 0.0}, "beta 0.0 must be above 0"),
    ],
)
def test_invalid_settings_are_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, **settings)


def test_updates_count_passes_times_parts() -> None:
    assert Updates(4, 2).count == 8 and build("gspo").updates == Updates(1, 4)
