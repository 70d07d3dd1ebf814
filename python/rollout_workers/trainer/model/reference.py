"""The model that training began with, to measure the policy against."""

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

from rollout_workers.trainer.distributed.ranks import Ranks
from rollout_workers.trainer.model.policy import Policy
from rollout_workers.trainer.packing import MicroBatch
from rollout_workers.trainer.types import TrainSample

_KEY_BYTES = 16
_PAGES, _PAGE_BYTES = 64, 4096  # of each file, of which its name is made


class Reference:
    """The policy with its adapters off, or without adapters a second copy of the model."""

    def __init__(self, policy: Policy, directory: str | os.PathLike[str]) -> None:
        """Load ``directory`` where the policy has no adapters. Raises ``OSError`` where it can't be loaded."""
        self.name = _name_of(Path(directory))
        """What it is, whatever folder it lies in: sums of another one are not its."""
        self._adapter = policy.adapter
        self._policy = policy
        if self._adapter is None:
            self._policy = Policy.load(directory, dtype=policy.model.dtype, device=policy.model.device)

    def shard(self, ranks: Ranks) -> None:
        """Keep this rank's part of the copy; without one there is nothing to do."""
        if self._adapter is None:
            self._policy.shard(ranks)

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch, *, temperature: float = 1.0) -> Tensor:
        """float32 [N]: logprobs of a micro-batch's trained tokens."""
        with self._adapter.off() if self._adapter is not None else nullcontext():
            return self._policy.logprobs(batch, temperature=temperature).tokens


class Forward(Protocol):
    """Computes the sums of logprobs that are not cached yet."""

    def totals(self, samples: Sequence[TrainSample], *, reference: bool = False) -> Tensor:
        """float64 [S]: the sum of each sample's trained logprobs."""
        ...


class ReferenceCache:
    """Sums of the reference's logprobs of data, by content: data comes back each epoch, and the reference never changes.

    Part of the training state: computed again beside other rows a sum may differ in its last bit.
    """

    def __init__(self) -> None:
        self._sums: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._sums)

    def totals(self, machine: Forward, samples: Sequence[TrainSample]) -> Tensor:
        """float64 [S]: the sum of each sample's trained logprobs under the reference; only new ones are computed."""
        keys = [_key(sample) for sample in samples]
        fresh = {key: sample for key, sample in zip(keys, samples, strict=True) if key not in self._sums}
        if fresh:
            self._sums.update(zip(fresh, machine.totals(list(fresh.values()), reference=True).tolist(), strict=True))
        return torch.tensor([self._sums[key] for key in keys], dtype=torch.float64)

    def tensors(self) -> dict[str, Tensor]:
        """``reference/keys`` uint8 [n, 16] and ``reference/sums`` float64 [n]."""
        keys = np.frombuffer(b"".join(self._sums), np.uint8).reshape(-1, _KEY_BYTES).copy()
        return {
            "reference/keys": torch.from_numpy(keys),
            "reference/sums": torch.tensor(list(self._sums.values()), dtype=torch.float64),
        }

    def load(self, keys: Tensor | None, sums: Tensor | None) -> None:
        """Hold what ``tensors`` gave, and nothing else; None: it gave nothing."""
        held = () if keys is None or sums is None else zip(keys.numpy(), sums.tolist(), strict=True)
        self._sums = {bytes(key): value for key, value in held}


def _name_of(directory: Path) -> str:
    """Of the weights' files: pages of each, as to read all would take seconds. No two trainings leave the same ones."""
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
