"""Saves sharded tensors as safetensors files, by torch.distributed.checkpoint.

Each rank writes its rows of a tensor to their place in the file, so no rank has a whole tensor, and
a file does not depend on the number of ranks: any of them reads the rows that it needs.
"""

from __future__ import annotations

import math
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future as TorchFuture

from rollout_workers.trainer.distributed.shards import local, sharded_like
from rollout_workers.trainer.types import RankLost
from rollout_workers.weights.digest import raw_bytes
from rollout_workers.weights.tensor_file import file_layout

Files = Mapping[str, Mapping[str, Tensor]]
"""Tensors by name, by the path of their file relative to a folder."""
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
_SPLIT = "\0"  # between file and name in the keys of torch's state


def save_files(directory: Path, files: Files, group: Any, begin: Callable[[], None], finish: Callable[[], None]) -> Future[Any]:
    """Copy the tensors to memory of the host, and write them in a thread: they may change as soon
    as the call returns. Every rank of ``group`` must call it. None: a single process.

    begin: called on rank 0 in the thread, before a file is created. finish: called there when all
    files are complete and synced, before the future is done. The future has the error of any rank.
    """
    saving: Any = async_save(
        {f"{file}{_SPLIT}{name}": tensor.detach() for file, tensors in files.items() for name, tensor in tensors.items()},
        storage_writer=TensorFileWriter(directory, begin, finish),
        planner=DefaultSavePlanner(flatten_state_dict=False),
        process_group=group,
        no_dist=group is None,
        async_stager=RowStager(),
    )
    return saving


def saved(saving: Future[Any]) -> None:
    """Wait for ``save_files``. Raises the error of the first rank that failed, ``RankLost`` if one
    is gone."""
    try:
        saving.result()
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise cause from None
    except RuntimeError as error:  # of gloo or NCCL
        raise RankLost(f"a rank of the learner was lost while a state was saved: {error}; the learner restarts") from error


class RowStager(AsyncStager):
    """Copies this rank's rows to memory of the host. torch's own copies whole storages, and the
    tensors of a flat vector share one."""

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: ``stage`` waits for the copies."""
        return False

    @torch.no_grad()
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """See ``AsyncStager``."""
        return {key: sharded_like(local(tensor).to("cpu", copy=True), tensor) for key, tensor in state_dict.items()}

    def synchronize_staging(self) -> None:
        """See ``AsyncStager``."""

    def close(self) -> None:
        """See ``AsyncStager``."""


class TensorFileWriter(StorageWriter):
    """Writes the parts of tensors into safetensors files that all ranks have under one path."""

    def __init__(self, directory: Path, begin: Callable[[], None], finish: Callable[[], None]) -> None:
        """begin, finish: called on the coordinator, before the files are created and when all ranks
        have written."""
        self._directory, self._begin, self._finish = directory, begin, finish

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See ``StorageWriter``."""

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """See ``StorageWriter``."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See ``StorageWriter``."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the files with their headers, on one rank, and give each rank the place of each
        tensor."""
        self._begin()
        layouts: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = defaultdict(dict)
        for item in (item for plan in plans for item in plan.items):
            file, _, name = item.index.fqn.partition(_SPLIT)
            assert item.tensor_data is not None
            layouts[file][name] = item.tensor_data.properties.dtype, tuple(item.tensor_data.size)
        places: dict[str, int] = {}
        for file, layout in layouts.items():
            header, starts, size = file_layout([(name, *entry) for name, entry in layout.items()])
            path = self._directory / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # readers may have mapped it
            with open(path, "wb") as out:
                out.write(header)
                out.truncate(size)
            places |= {f"{file}{_SPLIT}{name}": start for name, start in starts.items()}
        return [replace(plan, storage_data={item.index.fqn: places[item.index.fqn] for item in plan.items}) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Write this rank's parts, and sync the files."""
        by_file: dict[str, list[WriteItem]] = defaultdict(list)
        for item in plan.items:
            by_file[item.index.fqn.partition(_SPLIT)[0]].append(item)
        results: list[WriteResult] = []
        for file, items in by_file.items():
            descriptor = os.open(self._directory / file, os.O_WRONLY | os.O_CLOEXEC)
            try:
                for item in items:
                    part: Any = planner.resolve_data(item)
                    _write(descriptor, plan.storage_data[item.index.fqn], part, item)
                    results.append(WriteResult(item.index, part.nbytes, None))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        done: TorchFuture[list[WriteResult]] = TorchFuture()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """See ``StorageWriter``. The headers of the files have the metadata."""
        self._finish()

    def storage_meta(self) -> StorageMeta | None:
        """See ``StorageWriter``."""
        return None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """See ``StorageWriter``."""
        return True


def _write(descriptor: int, start: int, part: Tensor, item: WriteItem) -> None:
    """Write a part of a tensor, rows of it, to its place in a file. start: of the tensor."""
    data = item.tensor_data
    assert data is not None
    offsets, sizes, whole = data.chunk.offsets, data.chunk.sizes, data.size
    if list(sizes[1:]) != list(whole[1:]):
        raise ValueError(
            f"{item.index.fqn.partition(_SPLIT)[2]} is sharded by other dimensions than its rows: {list(sizes)} of {list(whole)}"
        )
    at = start + (offsets[0] * math.prod(whole[1:]) * part.element_size() if len(whole) else 0)
    content = raw_bytes(part.detach().contiguous())
    while content:  # one call writes at most 2 GiB
        written = os.pwrite(descriptor, content, at)
        content, at = content[written:], at + written
