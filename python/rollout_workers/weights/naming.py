"""The names and dtypes of tensors in manifests and transfers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

# A dtype's name in manifests and digests: the name in torch, without the prefix.
DTYPE_NAMES: dict[torch.dtype, str] = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The transport name of a dtype, such as ``float32``. Raises ``ValueError`` for an
    unsupported dtype."""
    name = DTYPE_NAMES.get(dtype)
    if name is None:
        raise ValueError(f"{dtype} has no transport name; cast the tensor to one of {sorted(DTYPE_NAMES.values())}")
    return name


def dtype_of(name: str) -> torch.dtype | None:
    """The dtype of a transport name; None for an unknown one."""
    return _DTYPES.get(name)


def named_weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a module under their Hugging Face names, each storage once.

    These are the entries of ``state_dict`` (parameters and persistent buffers) in its order; a
    tensor that is tied to an earlier one (``lm_head.weight`` to ``model.embed_tokens.weight``) is
    left out, as ``save_pretrained`` does. The tensors are the live ones, detached: they change with
    the next optimizer step or swap.
    """
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        yield name, tensor.detach()


class LiveWeights:
    """``named_weights`` of one module for repeated use. Parameters are looked up once, because
    walking the modules of a small model takes longer than copying its tensors. A module with
    buffers is walked each time, because moving it to another device replaces them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        live = module.state_dict(keep_vars=True)
        found = tuple((name, live[name]) for name, _ in named_weights(module))
        self._parameters = found if all(isinstance(tensor, nn.Parameter) for _, tensor in found) else None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._parameters is None:
            return named_weights(self._module)
        return ((name, parameter.detach()) for name, parameter in self._parameters)
