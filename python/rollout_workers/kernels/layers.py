"""RMSNorm, SwiGLU, and rotary embeddings in ``layers.c``, each in one pass over memory.

Tensors are float32, on the CPU, and contiguous. As many threads run as torch has.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor, nn

from rollout_workers.kernels.loading import loaded

BLOCK = 128  # rows per partial sum, as in layers.c
_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = {
    "rms_norm": [_POINTER, _POINTER, ctypes.c_float, _NUMBER, _NUMBER, _POINTER, _POINTER],
    "rms_norm_backward": [_POINTER, _POINTER, _POINTER, _POINTER, _NUMBER, _NUMBER, _POINTER, _POINTER],
    "swiglu": [_POINTER, _POINTER, _NUMBER, _POINTER],
    "swiglu_backward": [_POINTER, _POINTER, _POINTER, _NUMBER, _POINTER, _POINTER],
    "rotary": [_POINTER, _POINTER, _POINTER, _NUMBER, _NUMBER, _NUMBER, _NUMBER, ctypes.c_int, _POINTER],
}


class LayerKernels:
    """The functions of the library. They do not check shapes."""

    def __init__(self, library: Path) -> None:
        """Load ``library``. Raises ``OSError`` if it cannot be loaded."""
        self._library = library
        functions = ctypes.CDLL(str(library))
        self._functions = {}
        for name, arguments in _ARGUMENTS.items():
            function = self._functions[name] = getattr(functions, f"rollout_{name}")
            function.argtypes, function.restype = [*arguments, ctypes.c_int], None

    def __reduce__(self) -> tuple[type[LayerKernels], tuple[Path]]:
        """Copies of a model load the same library."""
        return LayerKernels, (self._library,)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """``x * scale * weight`` [N, H], and scale [N] = ``1 / sqrt(mean(x^2) + eps)``. x: [N, H].
        weight: [H]."""
        out, scale = torch.empty_like(x), x.new_empty(len(x))
        self._run("rms_norm", x, weight, eps, *x.shape, out, scale)
        return out, scale

    def rms_norm_backward(self, grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of x [N, H] and weight [H]."""
        grad_x, partial_sums = torch.empty_like(x), x.new_empty(-(-len(x) // BLOCK), x.shape[1])
        self._run("rms_norm_backward", grad, x, weight, scale, *x.shape, grad_x, partial_sums)
        return grad_x, partial_sums.sum(0)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """``silu(gate) * up``. gate, up: of one shape."""
        out = torch.empty_like(gate)
        self._run("swiglu", gate, up, gate.numel(), out)
        return out

    def swiglu_backward(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of gate and up."""
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        self._run("swiglu_backward", grad, gate, up, gate.numel(), grad_gate, grad_up)
        return grad_gate, grad_up

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor, *, backward: bool = False) -> Tensor:
        """Rotate the halves of each head against each other; backward: by the transposed matrix.

        x: [B, T, heads, D]. cos, sin: [B or 1, T, D].
        """
        out = torch.empty_like(x)
        rows, width, heads, size = x.shape
        self._run("rotary", x, cos, sin, rows * width, cos.shape[0] * width, heads, size // 2, backward, out)
        return out

    def _run(self, name: str, *arguments: Tensor | float) -> None:
        values = [given.data_ptr() if isinstance(given, Tensor) else given for given in arguments]
        self._functions[name](*values, torch.get_num_threads())


@functools.cache
def layer_kernels() -> LayerKernels | None:
    """The compiled kernels; None if they are not compiled."""
    return loaded(LayerKernels, "layers")


def supports(tensor: Tensor) -> bool:
    """Whether the kernels accept a tensor once it is contiguous: plain (not a shard), float32, on
    the CPU."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.dtype == torch.float32 and tensor.device.type == "cpu"
