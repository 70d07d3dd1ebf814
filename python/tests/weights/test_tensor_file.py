"""Our files and those of the safetensors library are interchangeable."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save, save_file

from rollout_workers.weights.tensor_file import read_tensors, write_tensors

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


def test_tensors_are_read_back_unchanged(tmp_path: Path) -> None:
    tensors = {f"t.{i}": (torch.randn(3, i) * 9).to(dtype) for i, dtype in enumerate(DTYPES)}  # the first tensor has no elements
    tensors |= {"scalar": torch.tensor(2.5), "é": torch.arange(70_000, dtype=torch.int32)}
    write_tensors(tmp_path / "a.safetensors", tensors)
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        read = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name


def test_writes_the_same_file_as_the_library(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(2, 3), "a": torch.randn(5).bfloat16(), "c": torch.randn(4)}
    write_tensors(tmp_path / "a", tensors)
    assert (tmp_path / "a").read_bytes() == save(tensors, metadata={"format": "pt"})


def test_reads_files_of_the_library(tmp_path: Path) -> None:
    tensors = {f"t.{i}": (torch.randn(3, i) * 9).to(dtype) for i, dtype in enumerate(DTYPES)}
    save_file(tensors, tmp_path / "a", metadata={"format": "pt"})
    read = read_tensors(tmp_path / "a")
    (tmp_path / "a").unlink()
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name
    read["t.1"].zero_()  # a private copy of the page


def test_a_truncated_or_changed_file_is_rejected(tmp_path: Path) -> None:
    """Changes every byte outside of the tensors: the header's length, the header, the end of the
    file."""
    path = tmp_path / "a"
    write_tensors(path, {"w": torch.arange(6.0).view(2, 3), "b": torch.arange(4, dtype=torch.int32)})
    whole = path.read_bytes()
    frame = 8 + int.from_bytes(whole[:8], "little")
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"safetensors|bytes|empty"):
            read_tensors(path)
    quiet = 0
    for at in range(frame):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            read = read_tensors(path)
        except ValueError:
            continue
        # A changed name, another dtype of equal width, or two swapped offsets: only the digest
        # detects them.
        quiet += 1
        assert sum(tensor.nbytes for tensor in read.values()) <= 40
    assert quiet < frame // 2


def test_dtypes_without_a_name_in_the_format_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tensor z: dtype torch\.complex64 is not supported; use one of F64"):
        write_tensors(tmp_path / "a", {"z": torch.zeros(1, dtype=torch.complex64)})
