"""Merges received adapters into full weights, with the same code that the learner uses.

The worker keeps the run's initial model in addition to the engine's weights. The merged weights are
verified like all others. If they differ from the learner's by a bit, for example on another
processor, the controller requests the full weights.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rollout_workers.trainer.model.adapter import Adapter, LoraConfig
from rollout_workers.trainer.model.policy import Policy


class Merging:
    """Merges adapters into the initial model. Calls run one after the other, because each changes
    the model."""

    def __init__(self, model_directory: str, dtype: torch.dtype, lora: LoraConfig, device: str | None = None) -> None:
        """Load the initial model. device: as for ``Policy.load_model``. Raises ``BadSettings``,
        ``OSError``."""
        self._adapter = Adapter(Policy.load_model(model_directory, dtype=dtype, device=device), lora)

    @torch.no_grad()
    def __call__(self, folder: Path) -> dict[str, Tensor]:
        """All tensors of a version by their Hugging Face names; tensors without adapters are those
        of the initial model. Raises ``WeightsUnreadable``."""
        self._adapter.read(folder)
        return dict(self._adapter.merged())
