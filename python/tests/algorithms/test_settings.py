"""Settings off their defaults, whose formulas no oracle records: each worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout_workers.algorithms import EstimatorBatch, TokenBatch, ValueBatch, build_algorithm
from rollout_workers.algorithms.advantage import leave_one_out
from rollout_workers.algorithms.distillation import DistillationConfig
from rollout_workers.algorithms.ppo import PpoConfig
from rollout_workers.algorithms.reinforce_pp import ReinforcePpConfig

SAMPLE = torch.tensor([0, 0, 1])


def of(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def rewarded(values: Tensor | None = None) -> EstimatorBatch:
    """Rewards 4 at the second token, 1 at the third."""
    return EstimatorBatch(rewards=of(4, 1), groups=torch.tensor([0, 0]), sample=SAMPLE, values=values)


def test_ppos_advantages_stay_as_they_are_without_whitening() -> None:
    """gamma 0.5, lambda 1: the discounted return less the value."""
    settings: dict[str, Any] = {"gamma": 0.5, "gae_lambda": 1.0, "kl_coefficient": 0.0}
    raw, white = (build_algorithm("ppo", PpoConfig(whiten_advantages=whiten, **settings)) for whiten in (False, True))
    assert raw.estimate is not None and white.estimate is not None
    found, other = raw.estimate(rewarded(of(1, 2, 5))), white.estimate(rewarded(of(1, 2, 5)))
    assert found.advantages.tolist() == [2 - 1, 4 - 2, 1 - 5]
    deviation = math.sqrt((16 + 49 + 121) / 9 / 2)  # of 1, 2, -4 around their mean -1/3
    assert other.advantages.tolist() == pytest.approx([(a + 1 / 3) / deviation for a in (1, 2, -4)])
    assert found.returns is not None and other.returns is not None
    assert found.returns.tolist() == other.returns.tolist() == [2, 4, 1]


@pytest.mark.parametrize(("clip", "errors", "slopes"), [(0.0, (2.0, 1.0), (1.0, -0.5)), (0.25, (2.0, 1.75), (1.0, 0.0))])
def test_a_value_clip_of_zero_is_no_bound(clip: float, errors: tuple[float, float], slopes: tuple[float, float]) -> None:
    """The second value went from 0 to 1, and its return is 2. Clipped at 0.25 its error is 1.75 and
    its gradient 0."""
    algorithm = build_algorithm("ppo", PpoConfig(value_clip=clip, value_coefficient=1.0))
    assert algorithm.value_loss is not None
    values = of(3, 1).requires_grad_()
    terms = algorithm.value_loss(ValueBatch(values, of(3, 0), of(1, 2), normalizer=2.0))
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(sum(error**2 / 2 for error in errors) / 2)
    assert ("value/clip_fraction" in terms.sums) is (clip > 0)
    assert values.grad is not None and values.grad.tolist() == pytest.approx(slopes)


def test_reinforce_pp_discounts_each_token() -> None:
    """gamma 0.5: returns 2, 4 and 1, of mean 7/3."""
    algorithm = build_algorithm("reinforce_pp", ReinforcePpConfig(gamma=0.5, kl_coefficient=0.0))
    assert algorithm.estimate is not None
    deviation = math.sqrt((1 + 25 + 16) / 9 / 2)
    found = algorithm.estimate(rewarded()).advantages.tolist()
    assert found == pytest.approx([(value - 7 / 3) / deviation for value in (2, 4, 1)])


def test_leave_one_out_within_a_group_divides_by_the_deviation_of_all_its_rewards() -> None:
    """Of 1, 2, 6 the others' means are 4, 3.5, 1.5; of 0, 2 they are 2, 0. Groups interleave, and
    differ in size."""
    found = leave_one_out(of(1, 0, 2, 2, 6), torch.tensor([0, 1, 0, 1, 0]), normalization="group", epsilon=0.0)
    three, two = math.sqrt((4 + 1 + 9) / 2), math.sqrt(2)
    assert found.tolist() == pytest.approx([-3 / three, -2 / two, -1.5 / three, 2 / two, 4.5 / three])
    assert leave_one_out(of(3, 3, 5), torch.tensor([0, 0, 1]), normalization="group").tolist() == [0, 0, 0]


def test_distillation_uses_the_engine_weight_and_the_ratio_since_the_first_update() -> None:
    """Three tokens: the policy left its old self by +0.5, 0, -0.5; the old self was 1.5, 5 (held
    at 2) and 0.5 times as likely as the engine's. The teacher's gains are 1, -2 and 3, measured
    against the policy as it stands."""
    algorithm = build_algorithm("distillation", DistillationConfig(off_policy=True, epochs=2, minibatches=3))
    assert algorithm.needs.engine_logprobs and algorithm.needs.old_logprobs and algorithm.updates.count == 6
    moves, weights, gains = (0.5, 0.0, -0.5), (1.5, 2.0, 0.5), (1.0, -2.0, 3.0)
    old = of(-2, -2, -2)
    logprobs = (old + of(*moves)).requires_grad_()
    terms = algorithm.loss(
        TokenBatch(
            logprobs=logprobs,
            normalizer=4.0,
            sample=SAMPLE,
            old_logprobs=old,
            engine_logprobs=old - of(1.5, 5, 0.5).log(),
            teacher_logprobs=logprobs.detach() + of(*gains),
        )
    )
    terms.loss.backward()
    each = [-math.exp(move) * weight * gain / 4 for move, weight, gain in zip(moves, weights, gains, strict=True)]
    assert terms.loss.item() == pytest.approx(sum(each))
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx(each)
    assert terms.sums["kl/teacher"].item() == pytest.approx(-2)
