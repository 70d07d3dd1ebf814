"""A device that is not the CPU, for machines without a GPU, and a pytest plugin (``-p far_device``)
that puts models there.

Only operations can read its tensors: ``numpy()`` and ``data_ptr()`` fail, as do operations that mix
tensors of the device and the CPU, in the same cases as for CUDA. Operations run on the CPU, so
results can be compared with those of the CPU. The device has torch's device type ``lazy``, which
has no kernels here and needs no streams in backward passes.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

os.environ.setdefault("MKL_CBWR", "AUTO")  # as conftest does, which is later than torch's import here

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

FAR = torch.device("lazy", 0)
aten = torch.ops.aten
MIXED = {aten._to_copy.default, aten.index.Tensor, aten.index_put.default, aten._index_put_impl_.default}
"""Operations for which CUDA accepts tensors of both devices: copies, and indices on the CPU."""


class Far(Tensor):
    """A tensor of the device. ``content``: the CPU tensor with its content."""

    content: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, content: Tensor) -> Far:
        return Tensor._make_wrapper_subclass(
            cls,
            content.shape,
            strides=content.stride(),
            storage_offset=content.storage_offset(),
            dtype=content.dtype,
            layout=content.layout,
            device=FAR,
        )

    def __init__(self, content: Tensor) -> None:
        self.content = content

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    @property
    def data(self) -> Far:
        return Far(self.content)

    @data.setter
    def data(self, value: Far) -> None:
        self.content = value.content

    def data_ptr(self) -> int:
        raise RuntimeError("this memory is not the CPU's")  # on CUDA the address would crash compiled code

    def tolist(self) -> Any:
        return self.content.tolist()


class Mode(TorchDispatchMode):
    """Creates tensors on the device if a call requests it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def near(value: Any) -> Any:
    return value.content if isinstance(value, Far) else value


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """One operation, on the CPU. Raises ``RuntimeError`` for operands of two devices."""
    leaves = tree_leaves((args, kwargs))
    far = [leaf for leaf in leaves if isinstance(leaf, Far)]
    if far or any(isinstance(leaf, torch.device) for leaf in leaves):
        with Mode():
            done = func.decompose(*args, **kwargs)
        if done is not NotImplemented:
            return done
    device = kwargs.get("device")
    lands_far = bool(far) if device is None else torch.device(device).type == FAR.type
    if not far and not lands_far:
        return func(*args, **kwargs)
    if func is aten.copy_.default:
        near(args[0]).copy_(near(args[1]))
        return args[0]
    if func is aten._fused_sdp_choice.default:
        return 0  # attention by plain operations
    cpu_tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, Far) and leaf.dim()]
    if far and cpu_tensors and func not in MIXED:
        raise RuntimeError(f"{func}: operands on two devices")
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    out = func(*tree_map(near, args), **tree_map(near, kwargs))
    if not lands_far or func is aten._local_scalar_dense.default:
        return out
    same = {id(leaf.content): leaf for leaf in far}  # of operations in place
    return tree_map(lambda leaf: same.get(id(leaf), Far(leaf)) if isinstance(leaf, Tensor) else leaf, out)


def install() -> None:
    """Let the engine and the learner load models onto the device, in all threads."""
    # tensors inside of it can't be wrapped
    torch.inference_mode = lambda mode=True: torch.no_grad() if mode else contextlib.nullcontext()
    torch.__future__.set_swap_module_params_on_conversion(True)  # keep tied weights tied
    begin = threading.Thread._bootstrap_inner

    def begin_far(thread: threading.Thread) -> None:
        with Mode():
            begin(thread)

    threading.Thread._bootstrap_inner = begin_far
    Mode().__enter__()

    from rollout_workers.engines.transformers.config import EngineConfig
    from rollout_workers.trainer.distributed.ranks import Ranks

    check = EngineConfig.__post_init__

    def place(config: EngineConfig) -> None:
        object.__setattr__(config, "device", config.device or str(FAR))
        check(config)

    EngineConfig.__post_init__ = place
    Ranks.loading_device = property(lambda _: str(FAR))


def pytest_configure() -> None:
    install()
