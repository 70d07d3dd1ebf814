"""Merges received adapters into full weights, with the same code that the learner uses.

The worker keeps the run's initial model in addition to the engine's weights. The merged weights are
verified like all others: if they differ by a bit from those of the learner (on another processor,
say), the controller has the full weights sent.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rollout_workers.trainer.model.adapter import Adapter, LoraConfig
from rollout_workers.trainer.model.policy import Policy
from rollout_workers.weights.store import ADAPTER_FILE, WeightsUnreadable
from rollout_workers.weights.tensor_file import read_tensors


class Merging:
    """Calls take turns: each leaves its adapters in the model."""

    def __init__(self, model_directory: str, dtype: torch.dtype, lora: LoraConfig, device: str | None = None) -> None:
        """Load the model that the adapters belong to. device: as for ``Policy.load_model``. Raises
        ``BadSettings``, ``OSError``."""
        self._adapter = Adapter(Policy.load_model(model_directory, dtype=dtype, device=device), lora)

    @torch.no_grad()
    def __call__(self, folder: Path) -> dict[str, Tensor]:
        """The tensors of a version by their Hugging Face names; what has no adapter is the model's
        own. Raises ``WeightsUnreadable``."""
        path = folder / ADAPTER_FILE
        try:
            sent = read_tensors(path)
        except (OSError, ValueError) as error:
            raise WeightsUnreadable(f"{path}: {error}") from error
        live = self._adapter.tensors()
        if {name: (t.shape, t.dtype) for name, t in live.items()} != {name: (t.shape, t.dtype) for name, t in sent.items()}:
            raise WeightsUnreadable(f"{path} holds other adapters than the plan's `lora` table makes")
        for name, tensor in live.items():
            tensor.copy_(sent[name])
        return dict(self._adapter.merged())
