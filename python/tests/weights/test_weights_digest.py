"""The digest agrees with the golden vectors, and changes with names, dtypes, shapes, and bytes."""

from __future__ import annotations

import json

import pytest
import torch

from rollout_workers.weights.digest import node_of_leaves, tensor_leaves, weights_digest
from rollout_workers.weights.naming import DTYPE_NAMES

from .weights_golden import GOLDEN, vectors
from .weights_reference import pattern

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
CASES = json.loads(GOLDEN.read_text())["cases"]


def tensor_of(dtype: str, shape: list[int]) -> torch.Tensor:
    """A tensor with the golden pattern."""
    count = torch.Size(shape).numel() * DTYPES[dtype].itemsize
    flat = torch.frombuffer(bytearray(pattern(count)), dtype=torch.uint8) if count else torch.empty(0, dtype=torch.uint8)
    return flat.view(DTYPES[dtype]).reshape(shape)


def test_golden_file_agrees_with_the_reference() -> None:
    assert json.loads(GOLDEN.read_text()) == vectors()


@pytest.mark.parametrize("case", CASES, ids=[case["case"] for case in CASES])
def test_golden_vector(case: dict) -> None:
    tensors = [(t["name"], tensor_of(t["dtype"], t["shape"])) for t in case["tensors"]]
    digest = weights_digest(tensors)
    assert digest.root == case["root"]
    assert dict(digest.tensors) == {t["name"]: t["digest"] for t in case["tensors"]}
    for (_, tensor), expected in zip(tensors, case["tensors"], strict=True):
        assert [leaf.hex() for leaf in tensor_leaves(tensor)] == expected["leaves"]


def test_threads_and_order_do_not_matter() -> None:
    tensors = [(f"layer.{i}", torch.randn(700, 1024, generator=torch.Generator().manual_seed(i))) for i in range(8)]
    assert sum(t.nbytes for _, t in tensors) > 16 << 20
    alone = {name: weights_digest([(name, tensor)]).tensors[name] for name, tensor in tensors}
    together = weights_digest(reversed(tensors))
    assert dict(together.tensors) == alone
    assert together.root == weights_digest(tensors).root


def test_layout_in_memory_does_not_matter() -> None:
    matrix = torch.randn(300, 40)
    assert weights_digest([("w", matrix.T.contiguous().T)]) == weights_digest([("w", matrix)])
    assert weights_digest([("w", torch.cat([matrix, matrix])[:300])]) == weights_digest([("w", matrix)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_one_flipped_bit_changes_the_digest(dtype: torch.dtype) -> None:
    tensor = torch.ones(600, 3).to(dtype)
    before = weights_digest([("w", tensor)])
    tensor.view(torch.uint8).view(-1)[-1] ^= 1
    assert weights_digest([("w", tensor)]).root != before.root


def test_a_rank_can_check_its_rows() -> None:
    whole = torch.randn(1024, 8)
    leaves = [leaf for rows in whole.chunk(2) for leaf in tensor_leaves(rows)]
    node = node_of_leaves("w", "float32", (1024, 8), leaves)
    assert "blake3-" + node.hex() == weights_digest([("w", whole)]).tensors["w"]


def test_a_duplicate_name_is_refused() -> None:
    with pytest.raises(ValueError, match="have the same name"):
        weights_digest([("w", torch.ones(1)), ("w", torch.ones(1))])


def test_an_unsupported_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="complex64 has no transport name"):
        weights_digest([("w", torch.ones(1, dtype=torch.complex64))])
