"""Staged weights arrive in the module unchanged, however they are copied."""

from __future__ import annotations

import pytest
import torch

from rollout_workers.engines.transformers import current_weights


@pytest.mark.parametrize("alone", [1, 1 << 30], ids=["by torch", "by one thread"])
@pytest.mark.parametrize(
    "source",
    [
        torch.randn(300, 200),
        torch.randn(300, 200).bfloat16(),
        torch.randn(200, 300).T,
        torch.randn(600, 200)[::2],
        torch.randn(301, 200)[1:],
    ],
    ids=["plain", "another dtype", "transposed", "every other row", "from a row on"],
)
def test_copies_are_equal(monkeypatch: pytest.MonkeyPatch, source: torch.Tensor, alone: int) -> None:
    monkeypatch.setattr(current_weights, "_ALONE_BYTES", alone)
    around = torch.zeros(302, 200)
    current_weights._copy(around[1:-1], source)
    assert torch.equal(around[1:-1], source.float())
    assert not around[0].any() and not around[-1].any()
    columns = torch.zeros(200, 300).T
    current_weights._copy(columns, source)
    assert torch.equal(columns, source.float())
