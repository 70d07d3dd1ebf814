"""The module's weights: stages new ones while decoding continues, loads them between tokens, and
computes digests."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from rollout_workers.engines.base import WeightsSource
from rollout_workers.engines.errors import NothingStaged, WeightsMismatch
from rollout_workers.weights import LiveWeights, WeightsDigest, named_weights, read_manifest, read_weights, weights_digest
from rollout_workers.weights.naming import dtype_name
from rollout_workers.weights.store import MANIFEST_FILE

_ALONE_BYTES = 4 << 20  # elements; larger tensors are copied faster by several threads


class CurrentWeights:
    """Manages the weights of a module. ``stage`` and ``digest`` may run in any thread, also during
    forward passes; ``load`` only between them."""

    def __init__(self, module: nn.Module) -> None:
        self._tensors = LiveWeights(module)
        self._kinds = {name: (tensor.shape, tensor.dtype) for name, tensor in self._tensors}
        self._staged: Mapping[str, Tensor] | None = None
        self.still = threading.Lock()
        """Held while tensors are digested, changed, or moved, because a digest reads their memory
        in another thread."""
        self._transport = {name: tensor.dtype for name, tensor in named_weights(module)}

    @property
    def staged(self) -> bool:
        """Whether staged weights wait for ``load``."""
        return self._staged is not None

    def stage(self, source: WeightsSource, expected: str | None = None) -> str:
        """Keep tensors for the next ``load`` and return the root of their digest. If it is not
        ``expected``, the folder's manifest shows which tensor differs. Raises ``WeightsMismatch``,
        ``WeightsUnreadable``."""
        tensors = read_weights(source) if isinstance(source, str | os.PathLike) else dict(source)
        self._check_fit(tensors)
        digest = weights_digest(tensors.items())
        folder = isinstance(source, str | os.PathLike)
        if folder and digest.root != expected and (Path(source) / MANIFEST_FILE).is_file():
            _check_manifest(Path(source), digest)
        self._staged = tensors
        return digest.root

    @torch.no_grad()
    def load(self) -> None:
        """Copy the staged tensors into the module. Raises ``NothingStaged``."""
        if self._staged is None:
            raise NothingStaged("no weights are staged: call stage_weights before swap_weights")
        staged, self._staged = self._staged, None
        with self.still:
            for name, tensor in self._tensors:
                _copy(tensor, staged[name])
            self._transport = {name: tensor.dtype for name, tensor in staged.items()}

    def digest(self) -> WeightsDigest:
        """The digest of the module's tensors, in the dtypes of their source."""
        with self.still:
            return weights_digest((name, tensor.to(self._transport[name])) for name, tensor in self._tensors)

    def _check_fit(self, tensors: Mapping[str, Tensor]) -> None:
        if {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()} == self._kinds:
            return  # usually the case
        held = dict(self._tensors)
        for name in sorted(held.keys() | tensors.keys()):
            if name not in tensors:
                raise WeightsMismatch(name, "a tensor", "nothing")
            if name not in held:
                raise WeightsMismatch(name, "no such tensor in the model", "one")
            expected, got = held[name], tensors[name]
            if expected.shape != got.shape:
                raise WeightsMismatch(name, f"shape {tuple(expected.shape)}", f"shape {tuple(got.shape)}")
            if torch.promote_types(expected.dtype, got.dtype) != expected.dtype:
                raise WeightsMismatch(
                    name, f"a dtype that converts to {dtype_name(expected.dtype)} without loss", dtype_name(got.dtype)
                )


def _copy(to: Tensor, source: Tensor) -> None:
    """``to.copy_(source)`` in one thread. torch uses several threads for more than 32,768 elements,
    and waiting for them takes tens of milliseconds if other processes use the cores."""
    plain = to.is_cpu and source.is_cpu and to.is_contiguous() and source.is_contiguous()
    if plain and to.dtype == source.dtype and to.nbytes < _ALONE_BYTES:
        ctypes.memmove(to.data_ptr(), source.data_ptr(), to.nbytes)
    else:
        to.copy_(source)


def _check_manifest(folder: Path, digest: WeightsDigest) -> None:
    manifest = read_manifest(folder)
    for entry in manifest.tensors:
        got = digest.tensors.get(entry.name, "nothing")
        if got != entry.digest:
            raise WeightsMismatch(entry.name, entry.digest, got)
    if manifest.digest != digest.root:
        raise WeightsMismatch("", manifest.digest, digest.root)
