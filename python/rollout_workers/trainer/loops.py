"""What a layer does one number at a time, by compiled code (``loops.c``), called through ctypes: each in one pass over memory.

``scripts/kernel`` compiles it when the environment is installed. The library is named for the content of its source, so one that
was made of other code is not loaded. Tensors are float32 on the CPU and contiguous; threads are as many as torch has.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import torch
from torch import Tensor, nn

from rollout_workers.compiled import library

log = logging.getLogger(__name__)
BLOCK = 128  # rows whose sum is one row of partial sums
SOURCE = Path(__file__).with_name("loops.c")
_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = {
    "norm": [_POINTER, _POINTER, ctypes.c_float, _NUMBER, _NUMBER, _POINTER, _POINTER],
    "norm_back": [_POINTER, _POINTER, _POINTER, _POINTER, _NUMBER, _NUMBER, _POINTER, _POINTER],
    "gate": [_POINTER, _POINTER, _NUMBER, _POINTER],
    "gate_back": [_POINTER, _POINTER, _POINTER, _NUMBER, _POINTER, _POINTER],
    "rotate": [_POINTER, _POINTER, _POINTER, _NUMBER, _NUMBER, _NUMBER, _NUMBER, ctypes.c_int, _POINTER],
}


class Loops:
    """The loops of a library. Shapes are the caller's to check."""

    def __init__(self, library: Path) -> None:
        """Raises ``OSError`` for what can't be loaded."""
        self._library = library
        loaded = ctypes.CDLL(str(library))
        self._call = {}
        for name, arguments in _ARGUMENTS.items():
            function = self._call[name] = getattr(loaded, f"rollout_{name}")
            function.argtypes, function.restype = [*arguments, ctypes.c_int], None

    def __reduce__(self) -> tuple[type[Loops], tuple[Path]]:
        """A copy of a model has the same loops."""
        return Loops, (self._library,)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x: [N, H]. weight: [H]. Returns ``x * scale * weight`` and scale [N], ``1 / sqrt(mean(x^2) + eps)``."""
        out, scale = torch.empty_like(x), x.new_empty(len(x))
        self._run("norm", x, weight, eps, *x.shape, out, scale)
        return out, scale

    def norm_back(self, grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of x [N, H] and of the weight [H]."""
        grad_x, parts = torch.empty_like(x), x.new_empty(-(-len(x) // BLOCK), x.shape[1])
        self._run("norm_back", grad, x, weight, scale, *x.shape, grad_x, parts)
        return grad_x, parts.sum(0)

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """``silu(gate) * up``, of one shape."""
        out = torch.empty_like(gate)
        self._run("gate", gate, up, gate.numel(), out)
        return out

    def gate_back(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of gate and up."""
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        self._run("gate_back", grad, gate, up, gate.numel(), grad_gate, grad_up)
        return grad_gate, grad_up

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
        """x: [B, T, heads, D]. cos, sin: [B or 1, T, D]. Each half turned against the other; back: by the transposed matrix."""
        out = torch.empty_like(x)
        rows, width, heads, size = x.shape
        self._run("rotate", x, cos, sin, rows * width, cos.shape[0] * width, heads, size // 2, back, out)
        return out

    def _run(self, name: str, *arguments: Tensor | float) -> None:
        values = [given.data_ptr() if isinstance(given, Tensor) else given for given in arguments]
        self._call[name](*values, torch.get_num_threads())


@functools.cache
def compiled() -> Loops | None:
    """The library of the source as it is; None where it is not there, and then torch's operations do the work."""
    try:
        return Loops(library(SOURCE))
    except OSError as error:
        log.warning("the learner's loops are torch's, a fifth slower: %s. Fix: scripts/kernel, which needs a C compiler", error)
        return None


def takes(tensor: Tensor) -> bool:
    """Whether a tensor is what the loops compute with, but for its strides: a plain one, of which no rank holds a part."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.dtype == torch.float32 and tensor.device.type == "cpu"
