"""The flat AdamW against torch's, parameter by parameter."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rollout_workers.trainer.optim.moments import AdamWConfig
from rollout_workers.trainer.optim.optimizer import FlatAdamW
from rollout_workers.trainer.optim.schedule import Schedule


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Matrices, biases, a norm, and a parameter that needs no gradient."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)
    module.register_parameter("frozen", nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False))
    return module


def gradients(module: nn.Module, seed: int) -> list[torch.Tensor]:
    """Random gradients of norm about 10."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in module.parameters() if p.requires_grad]


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0, 1000.0])
def test_agrees_with_torch(max_grad_norm: float) -> None:
    config = AdamWConfig(weight_decay=0.1, beta1=0.8, beta2=0.95, epsilon=1e-6, max_grad_norm=max_grad_norm)
    ours, theirs = net(), net()
    flat = FlatAdamW(ours, config)
    matrices, rest = ([p for p in theirs.parameters() if p.requires_grad and (p.dim() >= 2) == wide] for wide in (True, False))
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.8, 0.95),
        eps=1e-6,
        foreach=False,
    )
    for step in range(4):
        parts = [gradients(ours, 10 * step), gradients(ours, 10 * step + 1)]
        for part in parts:
            flat.add(part)
        trained = [p for p in theirs.parameters() if p.requires_grad]
        for p, a, b in zip(trained, *parts, strict=True):
            p.grad = a + b
        norm = nn.utils.clip_grad_norm_(trained, max_grad_norm or float("inf"))
        assert flat.norm() == pytest.approx(float(norm), rel=1e-5)
        flat.step(0.01, flat.norm())
        adamw.step()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_a_missing_gradient_counts_as_zero() -> None:
    module = net()
    flat = FlatAdamW(module, AdamWConfig(max_grad_norm=0))
    first, *rest = gradients(module, 0)
    flat.add(gradients(module, 1))
    flat.clear()
    flat.add([None, *rest])
    flat.add([first, *[None] * len(rest)])
    assert flat.norm() == pytest.approx(float(torch.cat([g.flatten() for g in (first, *rest)]).norm()), rel=1e-5)


def test_small_updates_of_a_bfloat16_model_add_up() -> None:
    module = net(torch.bfloat16)
    before = copy.deepcopy(module)
    flat = FlatAdamW(module, AdamWConfig(max_grad_norm=0))
    for _ in range(300):
        flat.add([torch.ones_like(p) for p in flat.parameters])
        flat.step(1e-5, 1.0)
    moments = flat.moments()
    for name in ("0.weight", "1.weight", "2.bias"):
        now, then, master = module.get_parameter(name), before.get_parameter(name), moments[f"master/{name}"]
        assert now.dtype == torch.bfloat16 and torch.equal(master.bfloat16(), now)
        torch.testing.assert_close(then.float() - master, torch.full_like(master, 3e-3), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("shape", "rates"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447]),
    ],
)
def test_schedules_warm_up_then_fall_and_never_stop(shape: str, rates: list[float]) -> None:
    schedule = Schedule(peak=1.0, shape=shape, warmup_steps=2, steps=6)
    assert [schedule.rate(step) for step in range(1, 7)] == pytest.approx(rates, abs=1e-6)
    assert Schedule(peak=2.0).rate(1) == 2.0


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="schedule 'step' is unknown; use one of constant, linear, cosine"):
        Schedule(peak=1.0, shape="step")
