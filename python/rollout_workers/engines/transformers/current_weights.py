"""The module's weights: stages new ones while decoding continues, loads them between tokens, and
computes digests."""

from __future__ import annotations

import ctypes
import random
import threading

import torch
from torch import Tensor, nn

from rollout_workers.engines.base import WeightsSource
from rollout_workers.engines.staging import Staging
from rollout_workers.weights import LiveWeights, WeightsDigest, named_weights, weights_digest
from rollout_workers.weights.digest import PREFIX, tensor_node

_ALONE_BYTES = 4 << 20  # elements; larger tensors are copied faster by several threads


class CurrentWeights:
    """Manages the weights of a module. ``stage`` and ``digest`` may run in any thread, also during
    forward passes; ``load`` only between them."""

    def __init__(self, module: nn.Module) -> None:
        self._tensors = LiveWeights(module)
        self._staging = Staging(dict(self._tensors))
        self.still = threading.Lock()
        """Held while tensors are digested, changed, or moved, because a digest reads their memory
        in another thread."""
        self._transport = {name: tensor.dtype for name, tensor in named_weights(module)}

    @property
    def staged(self) -> bool:
        """Whether staged weights wait for ``load``."""
        return bool(self._staging)

    def stage(self, source: WeightsSource, expected: str | None = None) -> str:
        """Keep tensors for the next ``load`` and return the root of their digest; see
        ``Staging``."""
        return self._staging.stage(source, expected)

    @torch.no_grad()
    def load(self) -> None:
        """Copy the staged tensors into the module. Raises ``NothingStaged``."""
        staged = self._staging.take()
        with self.still:
            for name, tensor in self._tensors:
                _copy(tensor, staged[name])
            self._transport = {name: tensor.dtype for name, tensor in staged.items()}

    def check(self, seed: int, most_bytes: int) -> str:
        """See ``SampledWeights.check_weights``."""
        with self.still:
            expected = self._staging.taken
            tensors = [(name, tensor) for name, tensor in self._tensors if name in expected]
            random.Random(seed).shuffle(tensors)
            checked = 0
            for name, tensor in tensors:
                if checked and checked + tensor.nbytes > most_bytes:
                    continue
                checked += tensor.nbytes
                if PREFIX + tensor_node(name, tensor.to(self._transport[name])).hex() != expected[name]:
                    return name
            return ""

    def digest(self) -> WeightsDigest:
        """The digest of the module's tensors, in the dtypes of their source."""
        with self.still:
            return weights_digest((name, tensor.to(self._transport[name])) for name, tensor in self._tensors)


def _copy(to: Tensor, source: Tensor) -> None:
    """``to.copy_(source)`` in one thread. torch uses several threads for more than 32,768 elements,
    and waiting for them takes tens of milliseconds if other processes use the cores."""
    plain = to.is_cpu and source.is_cpu and to.is_contiguous() and source.is_contiguous()
    if plain and to.dtype == source.dtype and to.nbytes < _ALONE_BYTES:
        ctypes.memmove(to.data_ptr(), source.data_ptr(), to.nbytes)
    else:
        to.copy_(source)
