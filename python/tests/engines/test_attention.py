"""Models with other attention or other position embeddings in some layers are decoded correctly at
every length, or rejected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rollout_workers.engines.errors import ModelUnsupported
from rollout_workers.engines.transformers import EngineConfig, TransformersEngine
from rollout_workers.engines.transformers.forward import choose_forward

from .tiny import byte_tokenizer, outputs, plain_logprobs, request, running

SMALL: dict[str, Any] = {
    "vocab_size": 257, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": None,
}  # fmt: skip
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 6, "long_factor": [4.0] * 6}  # fmt: skip


def gemma() -> PreTrainedModel:
    """A model with a window in every other layer, and caps on attention scores and logits."""
    return Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=12, sliding_window=8, final_logit_softcapping=3.0))


WINDOWS: dict[str, Callable[[], PreTrainedModel]] = {
    "all layers": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=8)),
    "some layers": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=1)),
    "capped": gemma,
}
REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str, int]] = {
    "longrope": (
        lambda: Phi3ForCausalLM(Phi3Config(**SMALL, original_max_position_embeddings=32, rope_parameters=LONG)),
        "phi3 computes other position embeddings for sequences longer than 32 tokens; set it to 32 or less",
        32,
    ),
    "dynamic": (
        lambda: LlamaForCausalLM(
            LlamaConfig(
                **SMALL | {"max_position_embeddings": 16},
                rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
            )
        ),
        "sequences longer than 16 tokens",
        16,
    ),
    "chunks": (
        lambda: Llama4ForCausalLM(
            Llama4TextConfig(**SMALL, head_dim=12, num_local_experts=2, intermediate_size_mlp=48, attention_chunk_size=16)
        ),
        "attends within chunks of 16 tokens",
        16,
    ),
    "local": (
        lambda: GPTNeoForCausalLM(
            GPTNeoConfig(
                vocab_size=257, hidden_size=48, num_layers=2, num_heads=4, window_size=16,
                attention_types=[[["global", "local"], 1]],
            )
        ),
        "attention to the last 16 tokens",
        16,
    ),
    "recurrent": (
        lambda: MambaForCausalLM(MambaConfig(vocab_size=257, hidden_size=48, num_hidden_layers=2)),
        "mamba has layers of linear_attention",
        0,
    ),
    "biases of distance": (
        lambda: BloomForCausalLM(BloomConfig(vocab_size=257, hidden_size=48, n_layer=2, n_head=4)),
        "can't be decoded step by step with a cache",
        0,
    ),
}  # fmt: skip


async def agree(engine: TransformersEngine, model: PreTrainedModel) -> None:
    """Compare the logprobs of prompts within and beyond the windows with plain calls."""
    batch = [request(f"r{length}", length=length, seeds=(1, 2), max_tokens=20) for length in (3, 7, 12, 40)]
    found = await outputs(engine, *batch)
    for r in batch:
        for sample in range(2):
            out = found[r.request_id, sample]
            assert out.finish_reason == "length"
            np.testing.assert_allclose(out.raw_logprobs, plain_logprobs(model, r.prompt_ids, out.token_ids), atol=1e-4)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", WINDOWS)
async def test_windows_are_decoded_correctly(name: str, deterministic: bool) -> None:
    torch.manual_seed(1)
    model = WINDOWS[name]().eval()
    async with running(model, deterministic=deterministic) as engine:
        await agree(engine, model)


async def test_a_model_without_sdpa_is_loaded(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = gemma().eval()
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    engine = TransformersEngine.load(tmp_path, EngineConfig(slots=8, max_len=64, threads=1))
    try:
        await agree(engine, model)
    finally:
        await engine.shutdown()


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_would_be_decoded_incorrectly_are_rejected(name: str) -> None:
    build, message, fits = REFUSED[name]
    torch.manual_seed(1)
    model = build().eval()
    with pytest.raises(ModelUnsupported, match=message) as refused:
        choose_forward(model, 64)
    assert refused.value.permanent, "restarting the worker does not help"
    if fits:
        choose_forward(model, fits)
