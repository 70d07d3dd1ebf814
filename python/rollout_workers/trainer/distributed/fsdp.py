"""Several ranks: FSDP2. Each holds a slice of the rows of every tensor; a block's tensors are whole only while it computes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from rollout_workers.trainer.distributed.ranks import Inside, Ranks
from rollout_workers.trainer.distributed.shards import local
from rollout_workers.trainer.types import BadSettings

T = TypeVar("T")
_FOREVER = timedelta(days=3650)  # the next order comes when it comes: sampling may take hours


class Group(Ranks):
    """One of several ranks, which talk through torch.distributed: NCCL on GPUs, gloo on the CPU.

    A rank that is gone fails the others' next call at once, one that hangs does after the time limit: with torch's RuntimeError.
    """

    def __init__(self, rank: int, size: int, *, rendezvous: str = "env://", timeout_seconds: float = 600.0) -> None:
        """Wait for the others. rendezvous: as ``init_process_group`` takes it; ``env://`` is what torchrun sets.

        Raises ``BadSettings`` where the host has GPUs, but fewer than the ranks that run on it.
        """
        self.rank, self.size = rank, size
        self._device = _device(int(os.environ.get("LOCAL_RANK", rank)))
        limit = timedelta(seconds=timeout_seconds)
        backend = "cpu:gloo,cuda:nccl" if self._device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=size, timeout=limit)
        self._talk: Any = dist.new_group(backend="gloo", timeout=limit)
        self._limit = limit
        self._orders: Any = dist.new_group(backend="gloo", timeout=_FOREVER)
        self._mesh = init_device_mesh(self._device, (size,))

    @property
    def loading_device(self) -> str:
        """The CPU: no GPU need hold a whole model."""
        return "cpu"

    def shard(self, module: nn.Module) -> Inside:
        """Keep this rank's rows of each tensor of ``module``, which is moved to the rank's device. Gathered together are the
        tensors of what the Hugging Face model in it names as a block, and all others."""
        kinds = {kind for part in module.modules() for kind in getattr(part, "_no_split_modules", None) or ()}
        options: dict[str, Any] = {
            "mesh": self._mesh,
            "reshard_after_forward": True,  # an update must never meet tensors that were gathered before it
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
        }
        for block in [block for block in module.modules() if type(block).__name__ in kinds]:
            fully_shard(block, **options)
        whole = _Whole(module)
        fully_shard(whole, **options)
        for part in whole.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)  # losses are parts of one sum already
                part.set_force_sum_reduction_for_comms(True)
        return whole

    def gradients(self, loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Reduced over the ranks while the backward pass goes on."""
        loss.backward()
        found: list[Tensor | None] = []
        for parameter in parameters:
            found.append(None if parameter.grad is None else local(parameter.grad))
            parameter.grad = None
        return found

    def exchange(self, value: T) -> list[T]:
        """The values of all ranks, which are pickled."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._talk)
        return values

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """An all-reduce each."""
        for tensor in tensors:
            dist.all_reduce(tensor, group=self._talk)

    def tell(self, order: object) -> None:
        """Rank 0: send an order to the others, which wait for it in ``hear``. One that does not take it within the time limit
        fails the call: with torch's RuntimeError."""
        wake = dist.broadcast(torch.zeros(1, dtype=torch.uint8), src=0, group=self._orders, async_op=True)
        assert wake is not None  # this rank is of the group
        wake.wait(self._limit)  # the group itself waits for ever, as those that hear do
        dist.broadcast_object_list([order], src=0, group=self._talk)

    def hear(self) -> Any:
        """The other ranks: wait for the next order, however long."""
        dist.broadcast(torch.empty(1, dtype=torch.uint8), src=0, group=self._orders)
        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=0, group=self._talk)
        return box[0]

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


class _Whole(nn.Module):
    """The root of what is sharded: work that reads tensors outside of their own module's call runs inside its call."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, work: Callable[..., T], *arguments: Any) -> T:
        """``work(*arguments)``, whose result is a tensor or a tuple, so that the backward pass is seen to begin."""
        return work(*arguments)


def _device(local_rank: int) -> str:
    if not torch.cuda.is_available():
        return "cpu"
    if local_rank >= torch.cuda.device_count():
        raise BadSettings(
            f"`train.ranks`: rank {local_rank} of this host has no GPU, there are {torch.cuda.device_count()}; "
            "take no more ranks than GPUs"
        )
    torch.cuda.set_device(local_rank)
    return "cuda"
