"""Fused RMSNorm (arXiv 1910.07467), SwiGLU (arXiv 2002.05202), and rotary embeddings (arXiv
2104.09864) on the CPU.

``install`` replaces the forward functions of a float32 model with autograd functions that pass over
memory once, where a model's own operations pass two to seven times. A layer is replaced only if it
is found to compute the same. Layers without a compiled kernel stay as they are, except RMSNorm,
which is faster here without a kernel too.
"""

from __future__ import annotations

from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rollout_workers.kernels.layers import LayerKernels, layer_kernels, supports
from rollout_workers.trainer.distributed.shards import gathered, local

TOLERANCE = 1e-5
"""The largest accepted difference from a model's own result, as a share of the largest value."""
_ROTARY = "apply_rotary_pos_emb"  # what the attention of transformers' models calls


def install(model: nn.Module) -> None:
    """Replace layers of a model in place; call it before sharding or adding adapters.

    A model on a GPU, or in another type than float32, stays as it is.
    """
    if any(supports(parameter) for parameter in model.parameters()):
        kernels = layer_kernels()
        install_rms_norm(model, kernels)
        if kernels is not None:
            install_swiglu(model, kernels)
            install_rotary(model, kernels)


def install_by_block(model: nn.Module) -> None:
    """``install`` in a sharded model, one block at a time: it compares with the layers that it
    replaces."""
    if not any(supports(local(parameter.detach())) for parameter in model.parameters()):
        return
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in kinds]
    inside = {id(module) for block in blocks for module in block.modules()}
    norms = [module for module in model.modules() if id(module) not in inside and type(module).__name__.endswith("RMSNorm")]
    for part in (*blocks, *norms):
        with gathered(part):
            install(part)


class TorchRmsNorm(torch.autograd.Function):
    """``x / sqrt(mean(x^2) + eps) * weight`` by torch's operations. x: float32 [..., H]. weight:
    float32 [H]."""

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


class FusedRmsNorm(torch.autograd.Function):
    """As :class:`TorchRmsNorm`, by the compiled kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, kernels: LayerKernels) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out, scale = kernels.rms_norm(rows, weight, eps)
        ctx.save_for_backward(rows, weight, scale)
        ctx.kernels = kernels
        return out.view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Any) -> tuple[Tensor | None, ...]:
        rows, weight, scale = ctx.saved_tensors
        grad_x, grad_weight = ctx.kernels.rms_norm_backward(grad.reshape(rows.shape).contiguous(), rows, weight, scale)
        return grad_x.view(grad.shape), grad_weight, None, None


class FusedSwiGlu(torch.autograd.Function):
    """``silu(gate) * up``. gate, up: float32 of one shape."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kernels: LayerKernels) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.kernels = kernels
        return kernels.swiglu(gate, up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Any) -> tuple[Tensor | None, ...]:
        """With s = sigmoid(gate): d gate = d up s (1 + gate (1 - s)), d up = d gate s."""
        return *ctx.kernels.swiglu_backward(grad.contiguous(), *ctx.saved_tensors), None


class FusedRotary(torch.autograd.Function):
    """Maps the halves a, b of each head to ``a cos - b sin, b cos + a sin``.

    x: float32 [B, T, heads, D]. cos, sin: [B or 1, T, D].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, kernels: LayerKernels) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.kernels = kernels
        return kernels.rotary(x.contiguous(), cos, sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Any) -> tuple[Tensor | None, ...]:
        """Multiplies by the transposed matrix."""
        return ctx.kernels.rotary(grad.contiguous(), *ctx.saved_tensors, backward=True), None, None, None


def install_rms_norm(model: nn.Module, kernels: LayerKernels | None) -> None:
    """Replace each norm of a float32 model on the CPU that is a plain RMSNorm."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            forward = NormForward(module, kernels)
            if _same_norm(module, forward):
                module.forward = forward


def install_swiglu(model: nn.Module, kernels: LayerKernels) -> None:
    """Replace each gated layer of a float32 model on the CPU that is a plain SwiGLU."""
    for module in model.modules():
        if all(isinstance(getattr(module, name, None), nn.Linear) for name in ("gate_proj", "up_proj", "down_proj")):
            forward = _GatedForward(module, kernels)
            if _same_gate(module, forward):
                module.forward = forward


def install_rotary(model: nn.Module, kernels: LayerKernels) -> None:
    """Make attention layers call :class:`Rotation` if the function that they call computes the
    same."""
    same: dict[Any, bool] = {}
    for module in model.modules():
        forward = type(module).forward
        if not isinstance(forward, FunctionType) or _ROTARY not in forward.__code__.co_names:
            continue
        own = forward.__globals__.get(_ROTARY)
        rotation = Rotation(own, kernels)
        if own not in same:
            same[own] = _same_rotation(rotation, own)
        if same[own]:
            names = forward.__globals__ | {_ROTARY: rotation}
            changed = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
            changed.__kwdefaults__ = forward.__kwdefaults__
            module.forward = MethodType(changed, module)


class NormForward:
    """Replaces a norm's ``forward``. Reads the module's weight at each call."""

    def __init__(self, module: Any, kernels: LayerKernels | None) -> None:
        self._module, self._kernels = module, kernels

    def __call__(self, hidden_states: Tensor) -> Tensor:
        weight, eps, kernels = self._module.weight, self._module.variance_epsilon, self._kernels
        fits = (
            supports(hidden_states) and supports(weight) and weight.shape == hidden_states.shape[-1:] and weight.is_contiguous()
        )
        if kernels is not None and fits:
            return FusedRmsNorm.apply(hidden_states, weight, eps, kernels)  # type: ignore[no-any-return]
        return TorchRmsNorm.apply(hidden_states, weight, eps)  # type: ignore[no-any-return]


class _GatedForward:
    """Replaces a gated layer's ``forward``. Calls the module's current projections, even if they
    were replaced later."""

    def __init__(self, module: Any, kernels: LayerKernels) -> None:
        self._module, self._kernels = module, kernels

    def __call__(self, hidden_states: Tensor) -> Tensor:
        module = self._module
        gate, up = module.gate_proj(hidden_states), module.up_proj(hidden_states)
        fits = supports(gate) and supports(up) and gate.shape == up.shape
        return module.down_proj(FusedSwiGlu.apply(gate, up, self._kernels) if fits else functional.silu(gate) * up)


class Rotation:
    """Replaces a model's ``apply_rotary_pos_emb``, and calls it for arguments that the kernel does
    not support."""

    def __init__(self, own: Any, kernels: LayerKernels) -> None:
        self._own, self._kernels = own, kernels

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **more: Any) -> tuple[Tensor, Tensor]:
        if others or more or cos.requires_grad or sin.requires_grad or not all(self._fits(x, cos, sin) for x in (q, k)):
            return self._own(q, k, cos, sin, *others, **more)
        cos, sin = cos.contiguous(), sin.contiguous()
        rotated = (FusedRotary.apply(x.transpose(1, 2), cos, sin, self._kernels) for x in (q, k))
        return tuple(x.transpose(1, 2) for x in rotated)  # type: ignore[return-value]

    def _fits(self, x: Tensor, cos: Tensor, sin: Tensor) -> bool:
        """Whether the kernel supports x [B, heads, T, D]."""
        if not (x.dim() == 4 and cos.dim() == 3 and supports(x) and supports(cos) and supports(sin) and cos.shape == sin.shape):
            return False
        rows, _, width, size = x.shape
        return size % 2 == 0 and cos.shape[1:] == (width, size) and cos.shape[0] in (1, rows)


@torch.no_grad()
def _same_norm(module: Any, forward: NormForward) -> bool:
    weight = module.weight
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        return False
    x = torch.linspace(-3, 2, 4 * weight.numel()).view(4, -1)
    wanted, found = module(x), forward(x)
    return bool((found - wanted).abs().max() <= TOLERANCE * wanted.abs().max())


@torch.no_grad()
def _same_gate(module: Any, forward: _GatedForward) -> bool:
    weight = module.gate_proj.weight
    if not supports(weight):
        return False
    x = torch.linspace(-3, 2, 4 * weight.shape[1]).sin().mul(3).view(1, 4, -1)
    for scale in (1, 1000):  # the second reveals a layer that clamps
        try:
            wanted, found = module(scale * x), forward(scale * x)
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return False
        most = wanted.abs().max()
        if wanted.shape != found.shape or not 0 < most < torch.inf or not (found - wanted).abs().max() <= TOLERANCE * most:
            return False
    return True


@torch.no_grad()
def _same_rotation(rotation: Rotation, own: Any) -> bool:
    """Whether both give the same for cosines and sines that differ everywhere."""
    q = torch.linspace(-3, 2, 2 * 4 * 3 * 8).mul(7).sin().view(2, 4, 3, 8)
    k = q[:, :2] * 0.5
    cos, sin = torch.linspace(-1, 1, 2 * 3 * 8).view(2, 3, 8), torch.linspace(2, 0.5, 2 * 3 * 8).view(2, 3, 8)
    try:
        wanted, found = own(q, k, cos, sin), rotation(q, k, cos, sin)
        return all(bool((a - b).abs().max() <= TOLERANCE * b.abs().max()) for a, b in zip(found, wanted, strict=True))
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return False
