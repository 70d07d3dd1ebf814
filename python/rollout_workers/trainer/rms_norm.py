"""RMSNorm (arXiv 1910.07467) in fewer passes over memory than the models' own takes: one forward and one backward where the loops
are compiled, half of them where not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rollout_workers.trainer.loops import Loops, compiled, takes

TOLERANCE = 1e-5  # of the largest value, by which a norm may differ from the model's own


class RmsNorm(torch.autograd.Function):
    """``x / sqrt(mean(x^2) + eps) * weight``. x: float32 [..., H]. weight: float32 [H]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        unit = x * scale
        ctx.save_for_backward(unit, scale, weight)
        return unit * weight

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Tensor | None, ...]:
        """With u = x * scale: dx = scale * (dy w - u mean(dy w u)), dw = sum(dy u)."""
        unit, scale, weight = ctx.saved_tensors
        product = grad * unit
        along = (product @ weight).div_(-product.shape[-1])
        grad_weight = product.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        grad_x = torch.mul(grad, weight, out=product)
        grad_x.addcmul_(unit, along[..., None]).mul_(scale)
        return grad_x, grad_weight, None


class LoopNorm(torch.autograd.Function):
    """``RmsNorm`` by the compiled loops."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, loops: Loops) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out, scale = loops.norm(rows, weight, eps)
        ctx.save_for_backward(rows, weight, scale)
        ctx.loops = loops
        return out.view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Any) -> tuple[Tensor | None, ...]:
        rows, weight, scale = ctx.saved_tensors
        grad_x, grad_weight = ctx.loops.norm_back(grad.reshape(rows.shape).contiguous(), rows, weight, scale)
        return grad_x.view(grad.shape), grad_weight, None, None


def install(model: nn.Module, loops: Loops | None = None) -> None:
    """Have the norms of a float32 model on the CPU computed so, each that is such a norm: one that is not gives other values."""
    loops = loops or compiled()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            forward = _Forward(module, loops)
            if _agrees(module, forward):
                module.forward = forward


class _Forward:
    """In place of a norm's own; the weight is the one that the module has when it is called."""

    def __init__(self, module: Any, loops: Loops | None) -> None:
        self._module, self._loops = module, loops

    def __call__(self, hidden_states: Tensor) -> Tensor:
        weight, eps, loops = self._module.weight, self._module.variance_epsilon, self._loops
        fits = takes(hidden_states) and takes(weight) and weight.shape == hidden_states.shape[-1:] and weight.is_contiguous()
        if loops is not None and fits:
            return LoopNorm.apply(hidden_states, weight, eps, loops)  # type: ignore[no-any-return]
        return RmsNorm.apply(hidden_states, weight, eps)  # type: ignore[no-any-return]


@torch.no_grad()
def _agrees(module: Any, forward: _Forward) -> bool:
    weight = module.weight
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        return False
    x = torch.linspace(-3, 2, 4 * weight.numel()).view(4, -1)
    wanted, found = module(x), forward(x)
    return bool((found - wanted).abs().max() <= TOLERANCE * wanted.abs().max())
