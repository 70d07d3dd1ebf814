"""What is written by hand, the library reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from rollout_workers.weights.tensor_file import write_tensors

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def test_reads_back_as_it_was(tmp_path: Path) -> None:
    tensors = {f"t.{i}": (torch.randn(3, i) * 9).to(dtype) for i, dtype in enumerate(DTYPES)}  # the first has no element
    tensors |= {"scalar": torch.tensor(2.5), "é": torch.arange(70_000, dtype=torch.int32)}
    write_tensors(tmp_path / "a.safetensors", tensors)
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        read = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name


def test_is_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(2, 3), "a": torch.randn(5).bfloat16(), "c": torch.randn(4)}
    write_tensors(tmp_path / "a", tensors)
    assert (tmp_path / "a").read_bytes() == save(tensors, metadata={"format": "pt"})


def test_refuses_what_the_format_has_not(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tensor z: dtype torch\.complex64 can't travel; there are F64"):
        write_tensors(tmp_path / "a", {"z": torch.zeros(1, dtype=torch.complex64)})
