"""Staged weights: read and verified while the engine decodes, and loaded between two tokens."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from rollout_workers.engines.base import WeightsSource
from rollout_workers.engines.errors import NothingStaged, WeightsMismatch
from rollout_workers.weights import WeightsDigest, read_manifest, read_weights, weights_digest
from rollout_workers.weights.naming import dtype_name
from rollout_workers.weights.store import MANIFEST_FILE


class Staging:
    """Weights for the next ``take``. ``stage`` may run in any thread."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """tensors: those of the model, which staged ones must fit."""
        self._kinds = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        self._staged: Mapping[str, Tensor] | None = None
        self._nodes: Mapping[str, str] = {}
        self.taken: Mapping[str, str] = {}
        """The digest of each tensor that the last ``take`` returned."""

    def __bool__(self) -> bool:
        return self._staged is not None

    def stage(self, source: WeightsSource, expected: str | None = None) -> str:
        """Keep tensors for the next ``take`` and return the root of their digest. If it is not
        ``expected``, the folder's manifest shows which tensor differs. Raises ``WeightsMismatch``,
        ``WeightsUnreadable``."""
        tensors = read_weights(source) if isinstance(source, str | os.PathLike) else dict(source)
        self._check_fit(tensors)
        digest = weights_digest(tensors.items())
        folder = isinstance(source, str | os.PathLike)
        if folder and digest.root != expected and (Path(source) / MANIFEST_FILE).is_file():
            _check_manifest(Path(source), digest)
        self._staged, self._nodes = tensors, digest.tensors
        return digest.root

    def take(self) -> Mapping[str, Tensor]:
        """The staged tensors, which are then no longer staged. Raises ``NothingStaged``."""
        if self._staged is None:
            raise NothingStaged("no weights are staged: call stage_weights before swap_weights")
        staged, self._staged, self.taken = self._staged, None, self._nodes
        return staged

    def _check_fit(self, tensors: Mapping[str, Tensor]) -> None:
        if {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()} == self._kinds:
            return  # usually the case
        for name in sorted(self._kinds.keys() | tensors.keys()):
            if name not in tensors:
                raise WeightsMismatch(name, "a tensor", "nothing")
            if name not in self._kinds:
                raise WeightsMismatch(name, "no such tensor in the model", "one")
            (shape, dtype), got = self._kinds[name], tensors[name]
            if shape != got.shape:
                raise WeightsMismatch(name, f"shape {tuple(shape)}", f"shape {tuple(got.shape)}")
            if torch.promote_types(dtype, got.dtype) != dtype:
                raise WeightsMismatch(name, f"a dtype that converts to {dtype_name(dtype)} without loss", dtype_name(got.dtype))


def _check_manifest(folder: Path, digest: WeightsDigest) -> None:
    manifest = read_manifest(folder)
    for entry in manifest.tensors:
        got = digest.tensors.get(entry.name, "nothing")
        if got != entry.digest:
            raise WeightsMismatch(entry.name, entry.digest, got)
    if manifest.digest != digest.root:
        raise WeightsMismatch("", manifest.digest, digest.root)
