"""Detects whether a causal model's logits are only the output of its head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

PROBE = 8  # tokens


@torch.no_grad()
def plain_head(model: PreTrainedModel) -> bool:
    """Whether the model's logits are exactly its output embedding, a linear layer, applied to the
    last hidden states of ``base_model``.

    Some models scale or cap logits, under many different config names. A cap may not change the
    small logits of a given model. So one call of the model replaces the head's output by powers of
    two, which must come out unchanged, and the head's input must equal the hidden states bit for
    bit. The hidden states come from ``base_model`` in the same call, or from a separate call if the
    model bypasses ``base_model`` and calls its submodules (OPT, BART).

    Raises ``torch.OutOfMemoryError``, because a full GPU does not answer the question.
    """
    head: Any = model.get_output_embeddings()
    trunk: Any = model.base_model
    if type(head) is not nn.Linear:
        return False
    seen: dict[str, Tensor] = {}

    def states(_module: nn.Module, _given: Any, made: Any) -> None:
        seen["states"] = made[0]

    def exchange(_module: nn.Module, given: Any, made: Tensor) -> Tensor:
        seen["given"], seen["made"] = given[0], powers(made)
        return seen["made"]

    hooks = [trunk.register_forward_hook(states), head.register_forward_hook(exchange)]
    token_ids = torch.arange(PROBE, device=model.device).mul_(7919).remainder_(model.config.get_text_config().vocab_size)
    try:
        made = model(input_ids=token_ids[None], use_cache=False)
        logits = made[0] if isinstance(made, tuple) else made.logits
        if "states" not in seen:
            trunk(input_ids=token_ids[None], use_cache=False)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return False
    finally:
        for hook in hooks:
            hook.remove()
    return (
        len(seen) == 3
        and torch.equal(seen["given"], seen["states"])
        and logits.shape == seen["made"].shape
        and torch.equal(logits.float(), seen["made"].float())
    )


def powers(like: Tensor) -> Tensor:
    """0, 1, -2, 4, -8 and so on, again from 0 before the type of ``like`` overflows, in its
    shape."""
    place = torch.arange(like.numel(), device=like.device) % (16 if like.dtype == torch.float16 else 100)
    made = torch.where(place > 0, (2.0 ** (place - 1)) * (1 - 2 * ((place - 1) % 2)), 0.0)
    return made.to(like.dtype).view_as(like)
