"""Several ranks with FSDP2. Each rank stores some rows of every tensor. The tensors of a block are
gathered while it computes."""

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
_FOREVER = timedelta(days=3650)  # sampling may take hours until the next call


class Group(Ranks):
    """One of several ranks, connected by torch.distributed: NCCL on GPUs, gloo on the CPU.

    If a rank dies, the next call of the others raises torch's ``RuntimeError`` at once; if it
    hangs, after the time limit.
    """

    def __init__(self, rank: int, size: int, *, rendezvous: str = "env://", timeout_seconds: float = 600.0) -> None:
        """Wait for the other ranks. rendezvous: the ``init_method`` of ``init_process_group``;
        ``env://`` under torchrun.

        Raises ``BadSettings`` if the host has GPUs, but fewer than ranks.
        """
        self.rank, self.size = rank, size
        self._device = _device(int(os.environ.get("LOCAL_RANK", rank)))
        limit = timedelta(seconds=timeout_seconds)
        backend = "cpu:gloo,cuda:nccl" if self._device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=size, timeout=limit)
        self._calls: Any = dist.new_group(backend="gloo", timeout=limit)
        self._limit = limit
        self.saving = dist.new_group(backend="gloo", timeout=limit)
        self._wakeups: Any = dist.new_group(backend="gloo", timeout=_FOREVER)
        self._mesh = init_device_mesh(self._device, (size,))

    @property
    def loading_device(self) -> str:
        """The CPU, for what is loaded whole, because a GPU may not have room for it."""
        return "cpu"

    def shard(self, module: nn.Module, fill: Callable[[], None] | None = None) -> Inside:
        """Keep this rank's rows of each tensor of ``module``, on the rank's device.

        The tensors of each block of the Hugging Face model (``_no_split_modules``) are gathered
        together, and so are the others.
        """
        kinds = {kind for part in module.modules() for kind in getattr(part, "_no_split_modules", None) or ()}
        options: dict[str, Any] = {
            "mesh": self._mesh,
            "reshard_after_forward": True,  # gathered tensors would be stale after an update
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
        }
        for block in [block for block in module.modules() if type(block).__name__ in kinds]:
            fully_shard(block, **options)
        whole = _Whole(module)
        fully_shard(whole, **options)
        for part in whole.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)  # the losses are already parts of one sum
                part.set_force_sum_reduction_for_comms(True)
        if fill is not None:
            whole.to_empty(device=self._device)
            fill()
        return whole

    def gradients(self, loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Reduced over the ranks during the backward pass."""
        loss.backward()
        found: list[Tensor | None] = []
        for parameter in parameters:
            found.append(None if parameter.grad is None else local(parameter.grad))
            parameter.grad = None
        return found

    def exchange(self, value: T) -> list[T]:
        """The values of all ranks; they are pickled."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._calls)
        return values

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """One all-reduce per tensor."""
        for tensor in tensors:
            dist.all_reduce(tensor, group=self._calls)

    def send(self, message: object) -> None:
        """Send a message from rank 0 to the others, which wait in ``receive``.

        Raises torch's ``RuntimeError`` if one of them does not receive it within the time limit.
        """
        wake = dist.broadcast(torch.zeros(1, dtype=torch.uint8), src=0, group=self._wakeups, async_op=True)
        assert wake is not None  # this rank is in the group
        wake.wait(self._limit)  # the group itself has no limit, for receivers
        dist.broadcast_object_list([message], src=0, group=self._calls)

    def receive(self) -> Any:
        """Wait for the next message of rank 0, without a time limit."""
        dist.broadcast(torch.empty(1, dtype=torch.uint8), src=0, group=self._wakeups)
        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=0, group=self._calls)
        return box[0]

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


class _Whole(nn.Module):
    """The root of the sharded modules. Code that reads tensors outside of their module's call runs
    inside this one's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, work: Callable[..., T], *arguments: Any) -> T:
        """``work(*arguments)``. The result must be a tensor or a tuple, for FSDP's backward
        hooks."""
        return work(*arguments)


def _device(local_rank: int) -> str:
    if not torch.cuda.is_available():
        return "cpu"
    if local_rank >= torch.cuda.device_count():
        raise BadSettings(
            f"`train.ranks`: rank {local_rank} of this host has no GPU, there are {torch.cuda.device_count()}; "
            "use at most as many ranks as GPUs"
        )
    torch.cuda.set_device(local_rank)
    return "cuda"
