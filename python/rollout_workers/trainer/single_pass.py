"""What layers do one number at a time, in single passes over memory, wherever that gives what a model itself does."""

from __future__ import annotations

from torch import nn

from rollout_workers.trainer import rms_norm, rotary, swiglu
from rollout_workers.trainer.loops import takes


def install(model: nn.Module) -> None:
    """Change a model in place before it is sharded or gets adapters; one on a GPU, or in another type than float32, is left
    alone."""
    if not any(takes(parameter) for parameter in model.parameters()):
        return
    for part in (rms_norm, swiglu, rotary):
        part.install(model)
