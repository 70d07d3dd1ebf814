"""Truncated importance weights."""

from __future__ import annotations

import pytest
import torch

from rollout_workers.algorithms.importance import truncated_weight


def test_the_ratio_is_capped_above_and_only_there() -> None:
    weights = truncated_weight(torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.5, -1.0, -6.0]), cap=2.0)
    assert weights.tolist() == pytest.approx([1.6487212, 1.0, 2.0])
    assert truncated_weight(torch.tensor([-9.0]), torch.tensor([0.0]), cap=2.0).item() == pytest.approx(1.2341e-4, rel=1e-4)


def test_the_weight_is_a_constant_for_the_gradient() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    assert not truncated_weight(logprobs, torch.tensor([-1.5]), cap=2.0).requires_grad
