"""Rotary positions (arXiv 2104.09864) in one pass over memory, forward and backward, where models' own take five and seven."""

from __future__ import annotations

from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from rollout_workers.trainer.loops import Loops, compiled, takes

NAME = "apply_rotary_pos_emb"  # what the library's models call
TOLERANCE = 1e-5


class Rotate(torch.autograd.Function):
    """Halves a, b of each head to ``a cos - b sin, b cos + a sin``. x: float32 [B, T, heads, D]. cos, sin: [B or 1, T, D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, loops: Loops) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.loops = loops
        return loops.rotate(x.contiguous(), cos, sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Any) -> tuple[Tensor | None, ...]:
        """By the transposed matrix."""
        return ctx.loops.rotate(grad.contiguous(), *ctx.saved_tensors, back=True), None, None, None


def install(model: nn.Module, loops: Loops | None = None) -> None:
    """Have the attention of a model turn queries and keys so, where what it calls for it gives these values."""
    loops = loops or compiled()
    if loops is None:
        return
    agree: dict[Any, bool] = {}
    for module in model.modules():
        forward = type(module).forward
        if not isinstance(forward, FunctionType) or NAME not in forward.__code__.co_names:
            continue
        own = forward.__globals__.get(NAME)
        rotation = _Rotation(own, loops)
        if own not in agree:
            agree[own] = _agrees(rotation, own)
        if agree[own]:
            names = forward.__globals__ | {NAME: rotation}
            changed = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
            changed.__kwdefaults__ = forward.__kwdefaults__
            module.forward = MethodType(changed, module)


class _Rotation:
    """In place of a model's function; that one is called for what is not as the loops want it."""

    def __init__(self, own: Any, loops: Loops) -> None:
        self._own, self._loops = own, loops

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **more: Any) -> tuple[Tensor, Tensor]:
        if others or more or cos.requires_grad or sin.requires_grad or not all(self._fits(x, cos, sin) for x in (q, k)):
            return self._own(q, k, cos, sin, *others, **more)
        cos, sin = cos.contiguous(), sin.contiguous()
        turned = (Rotate.apply(x.transpose(1, 2), cos, sin, self._loops) for x in (q, k))
        return tuple(x.transpose(1, 2) for x in turned)  # type: ignore[return-value]

    def _fits(self, x: Tensor, cos: Tensor, sin: Tensor) -> bool:
        """x: [B, heads, T, D]."""
        if not (x.dim() == 4 and cos.dim() == 3 and takes(x) and takes(cos) and takes(sin) and cos.shape == sin.shape):
            return False
        rows, _, width, size = x.shape
        return size % 2 == 0 and cos.shape[1:] == (width, size) and cos.shape[0] in (1, rows)


@torch.no_grad()
def _agrees(rotation: _Rotation, own: Any) -> bool:
    """Whether the function gives the same for cosines and sines that differ everywhere."""
    q = torch.linspace(-3, 2, 2 * 4 * 3 * 8).mul(7).sin().view(2, 4, 3, 8)
    k = q[:, :2] * 0.5
    cos, sin = torch.linspace(-1, 1, 2 * 3 * 8).view(2, 3, 8), torch.linspace(2, 0.5, 2 * 3 * 8).view(2, 3, 8)
    try:
        wanted, found = own(q, k, cos, sin), rotation(q, k, cos, sin)
        return all(bool((a - b).abs().max() <= TOLERANCE * b.abs().max()) for a, b in zip(found, wanted, strict=True))
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return False
