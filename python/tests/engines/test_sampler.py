"""Compares sampling with Hugging Face's warpers and the exact distribution, and random numbers with
published vectors."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rollout_workers.engines.base import SamplingParams
from rollout_workers.engines.transformers.philox import philox4x32, uniforms
from rollout_workers.engines.transformers.sampler import Controls, sample
from rollout_workers.engines.transformers.slots import SlotTable

CASES = [
    SamplingParams(8),
    SamplingParams(8, temperature=0.7),
    SamplingParams(8, top_k=5),
    SamplingParams(8, top_p=0.6),
    SamplingParams(8, min_p=0.2),
    SamplingParams(8, temperature=1.7, top_k=12, top_p=0.8, min_p=0.05),
    SamplingParams(8, top_k=1),
    SamplingParams(8, top_p=1e-6),
    SamplingParams(8, top_k=1000),
]


OWNER: Any = SimpleNamespace(text=None)
UNUSED: Any = None  # the input ids of the warpers


def controls_of(params: list[SamplingParams], vocabulary: int) -> Controls:
    table = SlotTable(len(params), len(params), 16, vocabulary)
    for slot, p in enumerate(params):
        table.occupy(np.array([slot]), [OWNER], 1, [0], p, 8, ())
    return table.controls(np.arange(len(params)), torch.device("cpu"))


def reference(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The log-probabilities of Hugging Face's warpers."""
    scores = TemperatureLogitsWarper(params.temperature)(UNUSED, logits) if params.temperature != 1 else logits
    if params.top_k:
        scores = TopKLogitsWarper(min(params.top_k, logits.shape[-1]))(UNUSED, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(UNUSED, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(UNUSED, scores)
    return scores.log_softmax(-1)


def test_mixed_rows_follow_the_reference_distribution() -> None:
    torch.manual_seed(0)
    draws, vocabulary = 400, 40
    rows = [params for params in CASES for _ in range(draws)]
    base = torch.randn(len(CASES), vocabulary) * 2
    logits = base.repeat_interleave(draws, dim=0)
    grid = ((torch.arange(draws, dtype=torch.float64) + 0.5) / draws).repeat(len(CASES))
    picked = sample(logits, grid, controls_of(rows, vocabulary))
    raw = base.log_softmax(-1)
    for i, params in enumerate(CASES):
        expected = reference(base[i : i + 1], params)[0]
        tokens = picked.tokens[i * draws : (i + 1) * draws]
        torch.testing.assert_close(picked.logprobs[i * draws : (i + 1) * draws], expected[tokens], atol=1e-5, rtol=0)
        torch.testing.assert_close(picked.raw_logprobs[i * draws : (i + 1) * draws], raw[i][tokens], atol=1e-5, rtol=0)
        # An even grid of uniforms must draw each token as often as its probability requires, plus
        # or minus one draw at either end.
        counts = torch.bincount(tokens, minlength=vocabulary)
        assert ((counts - expected.exp() * draws).abs() <= 1.01).all(), params


def test_greedy_rows_take_the_maximum_next_to_sampled_rows() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    picked = sample(
        logits, torch.tensor([0.999, 0.999]).double(), controls_of([SamplingParams(8, temperature=0), SamplingParams(8)], 3)
    )
    assert picked.tokens.tolist() == [1, 2]
    assert picked.logprobs[0] == 0
    torch.testing.assert_close(picked.raw_logprobs[0], logits[0].log_softmax(-1)[1])


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
def test_uniforms_at_the_ends_of_the_interval_draw_possible_tokens(uniform: float) -> None:
    logits = torch.full((1, 64), -torch.inf)
    logits[0, 7], logits[0, 9] = 0.0, -30.0
    picked = sample(logits, torch.tensor([uniform], dtype=torch.float64), Controls())
    assert picked.tokens.item() in (7, 9)
    assert picked.logprobs.isfinite().all()


@pytest.mark.parametrize("vocabulary", [54, 3001])
def test_the_bits_of_a_row_do_not_depend_on_other_rows(vocabulary: int) -> None:
    params = [*CASES, SamplingParams(8, temperature=0), SamplingParams(8, temperature=3.0)] * 8
    logits = torch.randn(len(params), vocabulary, generator=torch.Generator().manual_seed(1)) * 3
    uniform = torch.rand(len(params), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    together = sample(logits, uniform, controls_of(params, vocabulary))
    for row, its in enumerate(params):
        alone = sample(logits[row : row + 1], uniform[row : row + 1], controls_of([its], vocabulary))
        for one, among in zip(alone[:3], together[:3], strict=True):
            assert one.numpy().tobytes() == among[row : row + 1].numpy().tobytes(), its


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_non_finite_logits_only_affect_their_row(wrong: float) -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(3))
    logits[1, 70], logits[2] = wrong, -torch.inf
    params = [SamplingParams(8), SamplingParams(8), SamplingParams(8, temperature=2.0), SamplingParams(8)]
    picked = sample(logits, torch.full((4,), 0.5).double(), controls_of(params, 100))
    assert picked.raw_logprobs.isfinite().tolist() == [True, False, False, True]
    assert picked.logprobs.isfinite().tolist() == [True, False, False, True]
    assert ((picked.tokens >= 0) & (picked.tokens < 100)).all()


def test_philox_gives_the_published_words() -> None:
    # from Random123 1.09, kat_vectors: philox4x32 10
    zero = np.zeros(1, np.uint64)
    assert [int(w[0]) for w in philox4x32(zero, zero)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_uniforms_depend_on_seed_and_index_alone() -> None:
    seeds = np.array([3, 2**63 + 5], np.uint64)
    whole = uniforms(seeds, np.array([0, 0]), 64)
    assert (whole >= 0).all() and (whole < 1).all() and len(np.unique(whole)) == 128
    later = uniforms(seeds[::-1], np.array([32, 16]), 16)
    np.testing.assert_array_equal(later, [whole[1, 32:48], whole[0, 16:32]])
    assert abs(uniforms(np.arange(4000, dtype=np.uint64), np.zeros(4000, np.int64), 2).mean() - 0.5) < 0.01


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_k": -1},
        {"min_p": 2},
        {"stop": ("",)},
        {"max_tokens": 0},
    ],
)
def test_the_error_names_the_parameter_that_is_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**{"max_tokens": 4, **wrong})


@pytest.mark.parametrize("vocabulary", [4096, 4099, 49_152])
def test_a_large_vocabulary_is_searched_by_blocks_with_the_same_result(vocabulary: int) -> None:
    torch.manual_seed(vocabulary)
    logits = torch.randn(16, vocabulary) * 4
    logits[:, : vocabulary // 2 : 3] = -torch.inf
    logits[1] = -torch.inf
    logits[1, vocabulary - 1] = 0.0  # only the last token
    edges = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    uniform = torch.cat([edges, edges, torch.rand(12, dtype=torch.float64)])
    picked = sample(logits, uniform, Controls())
    cumulated = logits.double().softmax(-1).cumsum(-1)
    chosen = picked.tokens.unsqueeze(-1)
    upper = cumulated.gather(-1, chosen).squeeze(-1)
    lower = upper - logits.double().softmax(-1).gather(-1, chosen).squeeze(-1)
    assert logits.gather(-1, chosen).isfinite().all()
    assert ((lower <= uniform + 1e-6) & (uniform <= upper + 1e-6)).all()
    alone = torch.cat([sample(logits[i : i + 1], uniform[i : i + 1], Controls()).tokens for i in range(16)])
    assert torch.equal(alone, picked.tokens)
