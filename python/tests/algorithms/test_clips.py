"""The clips of GRPO, DAPO, CISPO, and GSPO after the first update of a batch: which tokens keep
their gradient, and how much of it."""

from __future__ import annotations

import math

import pytest
import torch

from rollout_workers.algorithms import TokenBatch, build_algorithm, config_type

RATIOS = [1.10, 1.25, 1.60, 0.95, 0.70]
"""p / p_old of five tokens of one sample. Above 1.2 is beyond GRPO's clip, above 1.28 beyond
DAPO's, and below 0.8 beyond both."""
GSPO_RATIO = math.prod(RATIOS) ** (1 / len(RATIOS))


def gradients(name: str, advantage: float, ratios: list[float]) -> list[float]:
    """-d loss / d log p of each token, with N = 1 and S = 1."""
    settings = {"max_tokens": 100} if name == "dapo" else {}
    algorithm = build_algorithm(name, config_type(name)(**settings))
    logprobs = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    size = len(ratios)
    tokens = TokenBatch(
        logprobs=logprobs,
        old_logprobs=torch.zeros(size, dtype=torch.float64),
        advantages=torch.full((size,), advantage, dtype=torch.float64),
        sample=torch.zeros(size, dtype=torch.int64),
        normalizer=1.0,
        samples=1.0,
    )
    algorithm.loss(tokens).loss.backward()
    assert logprobs.grad is not None
    return [-slope for slope in logprobs.grad.tolist()]


@pytest.mark.parametrize(
    ("name", "better", "worse"),
    [
        # min(r A, clip(r) A): no gradient above 1 + clip_high if A > 0, and below 1 - clip_low if A
        # < 0
        ("grpo", [1.10, 0.0, 0.0, 0.95, 0.70], [1.10, 1.25, 1.60, 0.95, 0.0]),
        # clip-higher (arXiv 2503.14476, section 3.1): 1.25 keeps its gradient if A > 0, and nothing
        # else changes
        ("dapo", [1.10, 1.25, 0.0, 0.95, 0.70], [1.10, 1.25, 1.60, 0.95, 0.0]),
        # arXiv 2506.13585, equation 4: every token keeps its gradient, weighted by its clipped
        # ratio
        ("cispo", RATIOS, RATIOS),
        # arXiv 2507.18071, equation 7: the sample's ratio is above 1 + 4e-4, for each token of it
        ("gspo", [0.0] * 5, [GSPO_RATIO / 5] * 5),
    ],
)
def test_which_tokens_keep_their_gradient(name: str, better: list[float], worse: list[float]) -> None:
    assert 1 + 4e-4 < GSPO_RATIO < 1.2
    assert gradients(name, 2.0, RATIOS) == pytest.approx([2.0 * weight for weight in better])
    assert gradients(name, -2.0, RATIOS) == pytest.approx([-2.0 * weight for weight in worse])


@pytest.mark.parametrize("name", ["grpo", "dapo", "cispo", "gspo"])
def test_in_the_first_update_they_are_the_same(name: str) -> None:
    """All ratios are 1, so only the reduction differs: that of GSPO is over samples."""
    assert gradients(name, 2.0, [1.0] * 5) == pytest.approx([2.0 / (5 if name == "gspo" else 1)] * 5)


def test_cispo_bounds_the_weight_above_and_not_below() -> None:
    assert gradients("cispo", 1.0, [7.0, 0.01]) == pytest.approx([5.0, 0.01])
