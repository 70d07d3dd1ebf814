"""The learner's own RMSNorm against the models', value and gradient."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from rollout_workers.trainer import rms_norm


class CentredRMSNorm(Qwen3RMSNorm):
    """Multiplies by one more than its weight, as Gemma's does."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) + hidden_states * 0.5


def norm_of(kind: type[Qwen3RMSNorm], width: int = 24) -> Qwen3RMSNorm:
    norm = kind(width, eps=1e-6)
    nn.init.normal_(norm.weight, 1.0, 0.3, generator=torch.Generator().manual_seed(0))
    return norm


def test_value_and_gradient_are_those_of_the_models_own() -> None:
    own, ours = norm_of(Qwen3RMSNorm), norm_of(Qwen3RMSNorm)
    rms_norm.install(nn.Sequential(ours))
    assert isinstance(ours.forward, rms_norm._Forward)
    for shape in ((7, 24), (2, 3, 5, 24)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        x[0] *= 1e4
        x[1] = 0
        weights = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        found, wanted = ours(one), own(other)
        torch.testing.assert_close(found, wanted)
        for a, b in zip(
            torch.autograd.grad(found, (one, ours.weight), weights),
            torch.autograd.grad(wanted, (other, own.weight), weights),
            strict=True,
        ):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_a_norm_that_is_another_is_left_alone() -> None:
    norm = norm_of(CentredRMSNorm)
    rms_norm.install(nn.Sequential(norm))
    assert "forward" not in vars(norm)


def test_other_types_are_left_alone() -> None:
    norm = norm_of(Qwen3RMSNorm).to(torch.bfloat16)
    rms_norm.install(nn.Sequential(norm))
    assert "forward" not in vars(norm)
