"""The model that training began with, to measure the policy against."""

from __future__ import annotations

import os
from contextlib import nullcontext

import torch
from torch import Tensor

from rollout_workers.learner.packing import MicroBatch
from rollout_workers.learner.policy import Policy


class Reference:
    """The policy with its adapters off, or without adapters a second copy of the model."""

    def __init__(self, policy: Policy, directory: str | os.PathLike[str]) -> None:
        """Load ``directory`` where the policy has no adapters. Raises ``OSError`` where it can't be loaded."""
        self._adapter = policy.adapter
        self._policy = policy if self._adapter is not None else Policy.load(directory, dtype=policy.model.dtype)

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch, *, temperature: float = 1.0) -> Tensor:
        """float32 [N]: logprobs of a micro-batch's trained tokens."""
        with self._adapter.off() if self._adapter is not None else nullcontext():
            return self._policy.logprobs(batch, temperature=temperature).tokens
