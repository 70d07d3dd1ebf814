"""Loads weights through vLLM's own loader of the model, and reads them back.

vLLM merges tensors: the projections of query, key, and value become one, gate and up another, and
embeddings get padded rows. While the loader runs, every copy from a tensor of the source is
recorded: which part of it went into which memory of the model. Reading back follows the records in
reverse, so it needs no knowledge of the model.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rollout_workers.engines.base import WeightsSource
from rollout_workers.engines.errors import ModelUnsupported
from rollout_workers.engines.staging import Staging
from rollout_workers.weights import WeightsDigest, weights_digest

VERIFY_NONE = 'set `weights.verify = "none"` to train without verification, or use another engine'
Loader = Callable[[Iterable[tuple[str, Tensor]]], Any]


@dataclass(frozen=True, slots=True)
class _Copy:
    """A part of a source tensor (its size, strides, and offset in elements) and the memory of the
    model that it was copied to."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    to: Tensor


class _Recorder(TorchDispatchMode):
    """Records the copies from the memory of ``tensors``."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.copies: dict[str, list[_Copy]] = {name: [] for name in tensors}
        ordered = sorted((tensor.data_ptr(), name) for name, tensor in tensors.items() if tensor.numel())
        self._starts = [start for start, _ in ordered]
        self._names = [name for _, name in ordered]
        self._ends = [start + tensors[name].nbytes for start, name in ordered]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._note(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _note(self, to: Tensor, source: Tensor) -> None:
        at = source.data_ptr()
        place = bisect_right(self._starts, at) - 1
        if place < 0 or at >= self._ends[place] or to.shape != source.shape:
            return
        offset = (at - self._starts[place]) // source.element_size()
        copy = _Copy(tuple(source.shape), source.stride(), offset, to.detach())
        self.copies[self._names[place]].append(copy)


class LoadedWeights:
    """The weights of a vLLM model by Hugging Face name. ``stage`` and ``digest`` may run in any
    thread, also during forward passes; ``load`` only between them."""

    def __init__(self, model: nn.Module, loader: Loader, tensors: Mapping[str, Tensor], verify: str = "full") -> None:
        """Load ``tensors``, all of the model. verify: see ``LoadRequest``. Raises
        ``ModelUnsupported``."""
        self._model, self._loader = model, loader
        self._staging = Staging(tensors)
        self._still = threading.Lock()
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self._transport: dict[str, torch.dtype] = {}
        self._copies: dict[str, list[_Copy]] = {}
        try:
            self._load(tensors)
        except (KeyError, ValueError, AssertionError, RuntimeError) as error:
            raise ModelUnsupported(f"vLLM can't load the weights of this model: {error!r}; use another engine") from error
        if verify != "none":
            self.digest()  # every tensor can be read back

    @property
    def staged(self) -> bool:
        """Whether staged weights wait for ``load``."""
        return bool(self._staging)

    def stage(self, source: WeightsSource, expected: str | None = None) -> str:
        """Keep tensors for the next ``load`` and return the root of their digest; see
        ``Staging``."""
        return self._staging.stage(source, expected)

    def load(self) -> None:
        """Load the staged tensors into the model. Raises ``NothingStaged``."""
        self._load(self._staging.take())

    def replace(self, tensors: Mapping[str, Tensor]) -> None:
        """Load other tensors into the model, all of it."""
        self._load(tensors)

    def digest(self) -> WeightsDigest:
        """The digest of the model's tensors, in the dtypes of their source. Raises
        ``ModelUnsupported``."""
        with self._still:
            return weights_digest(self._tensors())

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        recorder = _Recorder(tensors)
        with self._still:
            with torch.no_grad(), recorder:
                self._loader(tensors.items())
            self._copies = recorder.copies
            self._transport = {name: tensor.dtype for name, tensor in tensors.items()}

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        live = {
            tensor.untyped_storage().data_ptr() for group in (self._model.parameters(), self._model.buffers()) for tensor in group
        }
        for name, copies in self._copies.items():
            parts: dict[tuple[object, ...], _Copy] = {}
            for copy in copies:
                if copy.to.untyped_storage().data_ptr() not in live:
                    raise ModelUnsupported(f"vLLM replaced the memory of {name}, so it can't be read back; {VERIFY_NONE}")
                first = parts.setdefault((copy.size, copy.stride, copy.offset), copy)
                if not torch.equal(first.to, copy.to):  # the model has the tensor twice
                    parts[copy.size, copy.stride, copy.offset] = copy
            yield name, self._whole(name, list(parts.values()))

    def _whole(self, name: str, parts: list[_Copy]) -> Tensor:
        shape, dtype = self._shapes[name], self._transport[name]
        if sum(part.to.numel() for part in parts) != shape.numel():
            raise ModelUnsupported(f"vLLM did not load {name} as it is, so it can't be read back; {VERIFY_NONE}")
        if len(parts) == 1 and parts[0].size == tuple(shape):
            return parts[0].to.to(dtype)
        whole = torch.empty(shape, dtype=dtype, device=parts[0].to.device if parts else None)
        for part in parts:
            whole.as_strided(part.size, part.stride, part.offset).copy_(part.to)
        return whole


def keep_linear_weights() -> None:
    """Make vLLM use the weights of linear layers as they are, before it builds a model. On CPUs it
    would pack them for its kernels, and then they can neither be read back nor be loaded in
    place."""
    from vllm.model_executor.layers import utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain
