"""Attention in pieces gives the same result as a mask over whole rows, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from rollout_workers.trainer.model import tree_attention
from rollout_workers.trainer.model.policy import probe_samples, tree_mask
from rollout_workers.trainer.model.tree_layout import tree_layout
from rollout_workers.trainer.packing import MicroBatch, pack
from rollout_workers.trainer.types import TrainSample

CPU = torch.device("cpu")


def batch_of(groups: Sequence[tuple[int, Sequence[int]]]) -> MicroBatch:
    """Groups, each with the lengths of its prompt and answers, in one micro-batch."""
    draw = np.random.default_rng(1)
    samples = []
    for group, (prompt, answers) in enumerate(groups):
        head = draw.integers(1, 50, prompt)
        for number, answer in enumerate(answers):
            ids = np.concatenate((head, draw.integers(1, 50, answer))).astype(np.int32)
            mask = (np.arange(len(ids)) >= prompt).astype(np.uint8)
            samples.append(TrainSample(f"0/{group}", number, ids, prompt, mask, np.zeros(len(ids), np.float32)))
    (batch,) = pack(samples, range(len(samples)), tokens=1 << 20)
    assert batch.subtree_end is not None
    return batch


def layout_of(batch: MicroBatch) -> tree_attention.TreeLayout | None:
    assert batch.subtree_end is not None
    return tree_layout(batch.subtree_end, batch.sizes, CPU)


def parts(rows: int, width: int, heads: int, kv_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(rows, width, count, 8, generator=generator).transpose(1, 2).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    ]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(
    "groups",
    [
        [(64, [40, 40, 40])],
        [(60, [33, 70, 50, 41]), (90, [35, 36, 37]), (20, [64, 20])],
        [(200, [30] * 8), (40, [100] * 4), (3, [50, 60])],
    ],
    ids=["one tree", "of several sizes", "long prompt, long answers"],
)
def test_pieces_equal_masked_rows(groups: list[tuple[int, list[int]]], heads: int, kv_heads: int) -> None:
    batch = batch_of(groups)
    end, layout = batch.subtree_end, layout_of(batch)
    assert end is not None
    assert layout is not None
    rows, width = end.shape
    own, masked = parts(rows, width, heads, kv_heads), parts(rows, width, heads, kv_heads)
    query, key, value = own
    found, _ = tree_attention.attend(nn.Module(), query, key, value, None, scaling=0.3, tree=layout)

    key, value = (part.repeat_interleave(heads // kv_heads, 1) for part in masked[1:])
    wanted = scaled_dot_product_attention(
        masked[0], key, value, attn_mask=tree_mask(torch.from_numpy(end), torch.float32), scale=0.3
    ).transpose(1, 2)
    real = torch.from_numpy(np.arange(end.shape[1]) < batch.sizes[:, None])
    torch.testing.assert_close(found[real], wanted[real], atol=1e-5, rtol=1e-5)
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)) * real[..., None, None]
    for one, other in zip(torch.autograd.grad(found, own, weights), torch.autograd.grad(wanted, masked, weights), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def test_what_is_computed_is_far_less_than_the_rows() -> None:
    batch = batch_of([(256, [32] * 8)] * 2)
    layout, end = layout_of(batch), batch.token_ids
    assert layout is not None
    pairs = sum(len(piece.query.taken) * piece.keys for piece in layout.pieces)
    assert pairs < 0.6 * end.size * end.shape[1]


def test_the_probe_samples_are_split_into_pieces() -> None:
    samples = probe_samples(54)
    (batch,) = pack(samples, range(len(samples)), tokens=1 << 20)
    assert layout_of(batch) is not None


def test_short_pieces_are_left_to_a_mask() -> None:
    assert layout_of(batch_of([(5, [3] * 8)] * 8)) is None


def test_a_model_with_other_results_keeps_its_attention() -> None:
    chosen = ["sdpa"]
    model = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa"), set_attn_implementation=chosen.append)
    assert not tree_attention.install(model, lambda: False)  # type: ignore[arg-type]
    assert chosen == ["sdpa", tree_attention.NAME, "sdpa"]
