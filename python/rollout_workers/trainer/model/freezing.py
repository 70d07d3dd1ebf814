"""Frozen weights and gradient checkpointing."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rollout_workers.trainer.types import BadSettings


def freeze(model: PreTrainedModel, patterns: Sequence[str]) -> None:
    """Exclude the tensors whose Hugging Face names match a pattern (``model.layers.[0-3].*``) from
    training.

    A tied tensor matches by either name. Raises ``BadSettings`` if a pattern matches nothing, or if
    nothing is left to train.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matching = [parameter for name, parameter in named if fnmatchcase(name, pattern)]
        if not matching:
            raise BadSettings(f"`train.freeze` has {pattern!r}, which matches no tensor of the model, such as {named[0][0]}")
        for parameter in matching:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for _, parameter in named):
        raise BadSettings("`train.freeze` matches every tensor of the model: nothing is left to train")


def checkpoint_gradients(model: PreTrainedModel) -> None:
    """Recompute the activations of the model's layers in the backward pass, to the same bits,
    instead of storing them.

    The model stays in evaluation mode; only its layers have ``training`` set, with dropout 0.
    Raises ``BadSettings``.
    """
    if not model.supports_gradient_checkpointing:
        raise BadSettings(f"`train.gradient_checkpointing`: {type(model).__name__} does not support it; remove the line")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            layer: Any = module
            layer.training = True
            if isinstance(getattr(layer, "dropout", None), float):
                layer.dropout = 0.0
