"""Loads a model of several ranks: built on the meta device, sharded, and then filled by each rank
with its rows of the files, so that no rank has the whole model."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from rollout_workers.trainer.distributed.shards import assign
from rollout_workers.weights import named_weights, read_weights
from rollout_workers.weights.store import WeightsUnreadable

log = logging.getLogger(__name__)
_BASE = ".base_layer."
_MAGNITUDE = ".lora_magnitude_vector."


def on_meta(auto: Any, directory: str | os.PathLike[str], dtype: torch.dtype) -> tuple[Any, Mapping[str, Tensor]] | None:
    """The model of a folder without memory for its tensors, and their values by name, mapped from
    the files. None if the files have other tensors than the model, which transformers converts."""
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        with torch.device("meta"):
            model: Any = auto.from_config(config, dtype=dtype)
        files = read_weights(directory)
    except (ValueError, OSError, WeightsUnreadable):
        return None  # loading it whole raises what explains it
    model.config.return_dict = True  # outputs are read by name
    own = dict(named_weights(model))
    for prefix in ("", f"{model.base_model_prefix}."):
        if all(prefix + name in files and files[prefix + name].shape == tensor.shape for name, tensor in own.items()):
            return model, {name: files[prefix + name] for name in own}
    log.warning("each rank loads %s whole, because its files do not have the tensors of %s", directory, type(model).__name__)
    return None


@torch.no_grad()
def fill(model: Any, files: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> None:
    """Give an empty sharded model its values: its tensors from ``files``, adapters from ``others``,
    and what its config determines. A rank reads only its rows."""
    model.tie_weights()
    for name, live in named_weights(model):
        assign(live, others[name] if name in others else files[name.replace(_BASE, ".")])
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    model.initialize_weights()  # buffers that no file has


@contextmanager
def standing_in(model: nn.Module) -> Iterator[None]:
    """Inside the ``with`` block, parameters on the meta device are zeros on the CPU that need no
    memory, so that adapters are initialized as for a loaded model."""
    places = [(m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None and p.is_meta]
    zeros: dict[int, nn.Parameter] = {}
    for module, name, meta in places:
        if id(meta) not in zeros:
            zero = torch.zeros((), dtype=meta.dtype).expand(meta.shape)
            zeros[id(meta)] = nn.Parameter(zero, requires_grad=meta.requires_grad)
        module._parameters[name] = zeros[id(meta)]
    try:
        yield
    finally:
        for module, name, meta in places:
            meta.requires_grad_(zeros[id(meta)].requires_grad)
            module._parameters[name] = meta


def adapters_of(model: Any, files: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of the parameters that are not on the meta device: adapters. Magnitudes (DoRA) are the
    norms of the rows of the weights, which the model does not have yet."""
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if not parameter.is_meta}
    for name, tensor in found.items():
        layer, magnitude, _ = name.partition(_MAGNITUDE)
        if magnitude:
            weight = files[f"{layer}.weight"].to(tensor.dtype)
            tensor.copy_(torch.linalg.norm(weight.T if model.config.model_type == "gpt2" else weight, dim=1).view_as(tensor))
    return found
