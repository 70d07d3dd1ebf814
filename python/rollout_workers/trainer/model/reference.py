"""The reference: the initial model, for KL terms and preference losses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from rollout_workers.trainer.distributed.ranks import ALONE, Ranks
from rollout_workers.trainer.model.policy import Policy
from rollout_workers.trainer.packing import MicroBatch
from rollout_workers.trainer.types import TrainSample

_KEY_BYTES = 16
_PAGES, _PAGE_BYTES = 64, 4096  # of each file that are hashed


class Reference:
    """The policy with its adapters disabled, or a second copy of the model if the policy has no
    adapters."""

    def __init__(self, policy: Policy, directory: str | os.PathLike[str], ranks: Ranks = ALONE) -> None:
        """Load ``directory`` if the policy has no adapters. Raises ``OSError`` if it cannot be
        loaded."""
        self.name = _fingerprint(Path(directory))
        """Identifies the weights, independent of their folder, so that cached sums of another model
        are not used."""
        self._adapter = policy.adapter
        self._policy = policy
        if self._adapter is None:
            self._policy = Policy.load(directory, dtype=policy.model.dtype, ranks=ranks)

    def shard(self, ranks: Ranks) -> None:
        """Keep this rank's part of the copy, if there is one."""
        if self._adapter is None:
            self._policy.shard(ranks)

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch, *, temperature: float = 1.0) -> Tensor:
        """float32 [N]: logprobs of a micro-batch's trained tokens."""
        with self._adapter.disabled() if self._adapter is not None else nullcontext():
            return self._policy.logprobs(batch, temperature=temperature).tokens


class Forward(Protocol):
    """Computes the sums of logprobs that are not cached yet."""

    def totals(self, samples: Sequence[TrainSample], *, reference: bool = False) -> Tensor:
        """float64 [S]: the sum of each sample's trained logprobs."""
        ...


class ReferenceCache:
    """Sums of the reference's logprobs by the content of the sample: data recurs each epoch, and
    the reference never changes.

    Part of the training state: computed again in another batch, a sum could differ in its last bit.
    """

    def __init__(self) -> None:
        self._sums: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._sums)

    def totals(self, models: Forward, samples: Sequence[TrainSample]) -> Tensor:
        """float64 [S]: the sum of each sample's trained logprobs under the reference; computed once
        per sample."""
        keys = [_key(sample) for sample in samples]
        fresh = {key: sample for key, sample in zip(keys, samples, strict=True) if key not in self._sums}
        if fresh:
            self._sums.update(zip(fresh, models.totals(list(fresh.values()), reference=True).tolist(), strict=True))
        return torch.tensor([self._sums[key] for key in keys], dtype=torch.float64)

    def tensors(self) -> dict[str, Tensor]:
        """``reference/keys`` uint8 [n, 16] and ``reference/sums`` float64 [n]."""
        keys = np.frombuffer(b"".join(self._sums), np.uint8).reshape(-1, _KEY_BYTES).copy()
        return {
            "reference/keys": torch.from_numpy(keys),
            "reference/sums": torch.tensor(list(self._sums.values()), dtype=torch.float64),
        }

    def load(self, keys: Tensor | None, sums: Tensor | None) -> None:
        """Replace the content by what ``tensors`` returned; None: nothing."""
        entries = () if keys is None or sums is None else zip(keys.numpy(), sums.tolist(), strict=True)
        self._sums = {bytes(key): value for key, value in entries}


def _fingerprint(directory: Path) -> str:
    """A hash of sampled pages of each weights file: reading all of them would take seconds."""
    hasher = blake3()
    for path in sorted([*directory.glob("*.safetensors"), *directory.glob("*.bin")]):
        size = path.stat().st_size
        hasher.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for page in range(_PAGES):
                file.seek(size * page // _PAGES)
                hasher.update(file.read(_PAGE_BYTES))
    return hasher.hexdigest()


def _key(sample: TrainSample) -> bytes:
    return blake3(sample.token_ids.tobytes() + sample.loss_mask.tobytes()).digest(_KEY_BYTES)
