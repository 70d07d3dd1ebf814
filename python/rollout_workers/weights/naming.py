"""The names and dtypes under which a module's tensors travel."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

# The names of safetensors, so that a manifest, a file header and a digest spell a dtype alike in every language.
DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def dtype_name(dtype: torch.dtype) -> str:
    """The transport name of a dtype, such as ``F32``. Raises ``ValueError`` for one that has none."""
    name = DTYPE_NAMES.get(dtype)
    if name is None:
        raise ValueError(f"{dtype} has no transport name; cast the tensor to one of {sorted(DTYPE_NAMES.values())}")
    return name


def named_weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a module under their Hugging Face names, each storage once.

    These are the entries of ``state_dict`` (parameters and persistent buffers) in its order; a tensor that is tied to an
    earlier one (``lm_head.weight`` to ``model.embed_tokens.weight``) is left out, as ``save_pretrained`` does. The tensors
    are the live ones, detached: they change with the next optimizer step or swap.
    """
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        yield name, tensor.detach()
