"""How a rollout worker gets the weights of the actor."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from rollout_workers.multistep.errors import WeightsMismatch
from rollout_workers.weights.digest import weights_digest


@dataclass(frozen=True, slots=True)
class ActorWeights:
    """Weights of one version. digest: of :func:`weights_digest`, or "" if the actor computed
    none."""

    version: int
    tensors: Mapping[str, Tensor]
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Receipt:
    """The version that a policy holds, and the digest of the tensors that it really holds."""

    version: int
    digest: str


class WeightSource(Protocol):
    """Where the weights of the actor come from."""

    async def receive(self) -> ActorWeights:
        """Weights that were not received yet; waits for them. Tensors may be the actor's own: the
        caller copies them."""
        ...


class MemoryWeights:
    """A :class:`WeightSource` within one event loop. One worker receives from it."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[ActorWeights] = asyncio.Queue()

    def publish(self, weights: ActorWeights) -> None:
        self._queue.put_nowait(weights)

    async def receive(self) -> ActorWeights:
        return await self._queue.get()


def load_strictly(policy: nn.Module, weights: ActorWeights) -> Receipt:
    """Copy all tensors into the policy, on its devices and in its dtypes. Raises
    :class:`WeightsMismatch` before the first one is copied if a name is missing or unknown, or a
    shape differs; and afterwards if the digest of the policy is not that of the actor."""
    held = policy.state_dict(keep_vars=False)
    problems = [f"{name} is missing" for name in held if name not in weights.tensors]
    problems += [f"{name} is unknown to the policy" for name in weights.tensors if name not in held]
    problems += [
        f"{name} has the shape {list(weights.tensors[name].shape)}, the policy's {list(tensor.shape)}"
        for name, tensor in held.items()
        if name in weights.tensors and weights.tensors[name].shape != tensor.shape
    ]
    if problems:
        more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise WeightsMismatch(
            f"weights of version {weights.version}: {', '.join(problems[:3])}{more}",
            fix="publish the state_dict of a policy with the same config.json",
        )
    previous = {name: tensor.clone() for name, tensor in held.items()} if weights.digest else {}
    _copy(held, weights.tensors)
    digest = weights_digest(held.items()).root
    if weights.digest and digest != weights.digest:
        _copy(held, previous)
        raise WeightsMismatch(
            f"weights of version {weights.version} have the digest {digest} in the policy, and the actor's is {weights.digest}",
            fix="give actor and policy the same dtype",
        )
    return Receipt(weights.version, digest)


def _copy(into: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in into.items():
            tensor.copy_(tensors[name])
