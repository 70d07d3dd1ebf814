"""A policy uses its shortcuts only for models that support them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from rollout_workers.trainer.model.policy import Policy
from rollout_workers.trainer.packing import pack

from .addition import sampled_batch
from .oracle import sample_logprobs

SMALL: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def gemma() -> PreTrainedModel:
    """Windows on half of its layers, a cap on its logits."""
    return Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, sliding_window=4, final_logit_softcapping=0.1))


def local() -> PreTrainedModel:
    """GPT-Neo counts its window in places of the row; this one is wider than the probe of prefix
    trees."""
    kinds = [[["global", "local"], 1]]
    return GPTNeoForCausalLM(
        GPTNeoConfig(vocab_size=60, hidden_size=32, num_layers=2, num_heads=4, attention_types=kinds, window_size=200)
    )


CASES = {
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**SMALL)), True, True),
    "gpt2": (lambda: GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=4)), True, True),
    "windows": (lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4)), False, True),
    "local": (local, False, True),
    "capped logits": (gemma, False, False),
    "recurrent": (lambda: MambaForCausalLM(MambaConfig(vocab_size=60, hidden_size=32, num_hidden_layers=2)), False, True),
}


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_model_gives_the_logprobs_of_plain_calls(name: str) -> None:
    build, share_prefixes, linear_head = CASES[name]
    torch.manual_seed(0)
    model = build()
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.5)
    policy = Policy(model)
    assert (policy.share_prefixes, policy.linear_head) == (share_prefixes, linear_head)
    samples = sampled_batch(1)
    (batch,) = pack(samples, range(len(samples)), tokens=1 << 16, share_prefixes=policy.share_prefixes)
    found = policy.logprobs(batch, temperature=0.8)
    for index, sample in enumerate(samples):
        wanted = sample_logprobs(model, sample, 0.8)[batch.place[batch.sample == index] - 1]
        torch.testing.assert_close(found.tokens[batch.sample == index], wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["capped", "scaled"])
def test_small_logits_of_bfloat16_hide_neither_cap_nor_scale(name: str) -> None:
    """They do not change the small logits of fresh weights, but would change the larger logits of
    trained weights."""
    torch.manual_seed(0)
    config = Gemma2Config(**SMALL, head_dim=8) if name == "capped" else CohereConfig(**SMALL, logit_scale=0.25)
    model = (Gemma2ForCausalLM(config) if name == "capped" else CohereForCausalLM(config)).bfloat16()
    weight = model.get_output_embeddings().weight
    torch.nn.init.normal_(weight, std=1e-3)
    policy = Policy(model)
    assert not policy.linear_head
    torch.nn.init.normal_(weight, std=4.0)
    samples = sampled_batch(1)
    (batch,) = pack(samples, range(len(samples)), tokens=1 << 16, share_prefixes=False)
    found = policy.logprobs(batch)
    for index, sample in enumerate(samples):
        wanted = sample_logprobs(model, sample, 1.0)[batch.place[batch.sample == index] - 1]
        torch.testing.assert_close(found.tokens[batch.sample == index], wanted.float(), atol=0.5, rtol=0.05)


def test_a_model_without_attention_loads(tmp_path: Path) -> None:
    CASES["recurrent"][0]().save_pretrained(tmp_path)
    assert not Policy.load(tmp_path).share_prefixes


def test_neighbours_do_not_change_a_sample(model_dir: Path) -> None:
    """The logprobs of a sample do not depend on other samples in its row."""
    policy = Policy.load(model_dir)
    samples = sampled_batch(2)
    (together,) = pack(samples, range(len(samples)), tokens=1 << 16)
    (alone,) = pack(samples, [5], tokens=1 << 16)
    torch.testing.assert_close(
        policy.logprobs(together).tokens[together.sample == 5], policy.logprobs(alone).tokens, atol=1e-5, rtol=1e-5
    )


def test_entropy_of_a_uniform_distribution(model_dir: Path) -> None:
    policy = Policy.load(model_dir)
    torch.nn.init.zeros_(policy.model.get_parameter("model.embed_tokens.weight"))  # tied to the head
    (batch,) = pack(sampled_batch(0), range(24), tokens=1 << 16)
    entropy = policy.logprobs(batch).entropy
    torch.testing.assert_close(entropy, torch.full_like(entropy, 54.0).log())
