"""SwiGLU (arXiv 2002.05202) in one pass over memory forward and one backward, where a model's own layers take two and three."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rollout_workers.trainer.loops import Loops, compiled, takes

TOLERANCE = 1e-5  # of the largest value, by which a layer may differ from the model's own


class SwiGlu(torch.autograd.Function):
    """``silu(gate) * up``. gate, up: float32 of one shape."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, loops: Loops) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.loops = loops
        return loops.gate(gate, up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Any) -> tuple[Tensor | None, ...]:
        """With s = sigmoid(gate): d gate = d up s (1 + gate (1 - s)), d up = d gate s."""
        return *ctx.loops.gate_back(grad.contiguous(), *ctx.saved_tensors), None


def install(model: nn.Module, loops: Loops | None = None) -> None:
    """Have the gated layers of a float32 model on the CPU computed so, each that is one: one that is not gives other values."""
    loops = loops or compiled()
    if loops is None:
        return
    for module in model.modules():
        if all(isinstance(getattr(module, name, None), nn.Linear) for name in ("gate_proj", "up_proj", "down_proj")):
            forward = _Forward(module, loops)
            if _agrees(module, forward):
                module.forward = forward


class _Forward:
    """In place of a layer's own. Its projections are called, whatever has been made of them since."""

    def __init__(self, module: Any, loops: Loops) -> None:
        self._module, self._loops = module, loops

    def __call__(self, hidden_states: Tensor) -> Tensor:
        module = self._module
        gate, up = module.gate_proj(hidden_states), module.up_proj(hidden_states)
        fits = takes(gate) and takes(up) and gate.shape == up.shape
        return module.down_proj(SwiGlu.apply(gate, up, self._loops) if fits else functional.silu(gate) * up)


@torch.no_grad()
def _agrees(module: Any, forward: _Forward) -> bool:
    weight = module.gate_proj.weight
    if not takes(weight):
        return False
    x = torch.linspace(-3, 2, 4 * weight.shape[1]).sin().mul(3).view(1, 4, -1)
    for far in (1, 1000):  # at the second a layer is known that clamps
        try:
            wanted, found = module(far * x), forward(far * x)
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return False
        most = wanted.abs().max()
        if wanted.shape != found.shape or not 0 < most < torch.inf or not (found - wanted).abs().max() <= TOLERANCE * most:
            return False
    return True
