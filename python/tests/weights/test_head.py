"""Detects models whose logits are only the output of their head, for any weights, dtype, and extra
operation."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
)

from rollout_workers.engines.transformers.score import linear_head
from rollout_workers.trainer.model.policy import Policy
from rollout_workers.weights.head import plain_head

SMALL: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
OPT = OPTConfig(vocab_size=60, hidden_size=32, ffn_dim=48, num_hidden_layers=1, num_attention_heads=4, word_embed_proj_dim=16)
BART = BartConfig(vocab_size=60, d_model=32, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=48)
CASES: dict[str, tuple[Callable[[], PreTrainedModel], bool]] = {
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**SMALL)), True),
    "gpt2": (lambda: GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=32, n_layer=1, n_head=4)), True),
    "a bias": (lambda: PhiForCausalLM(PhiConfig(**SMALL)), True),
    "opt, which calls its decoder": (lambda: OPTForCausalLM(OPT), True),
    "bart, which calls its decoder": (lambda: BartForCausalLM(BART), True),
    "a cap": (lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=30.0)), False),
    "a cap far off": (lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=1e6)), False),
    "no cap": (lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=None)), True),
    "a product": (lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.9)), False),
    "a product of 1": (lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=1.0)), True),
    "a quotient": (lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=1.01)), False),
    "a multiplier": (lambda: FalconH1ForCausalLM(FalconH1Config(**SMALL, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8,
                     mamba_d_state=8, mamba_n_groups=1, lm_head_multiplier=1.1)), False),
}  # fmt: skip


class Shifted(LlamaForCausalLM):
    """A model with an unknown extra operation before or after the head."""

    where = "after"

    def forward(self, input_ids: Any = None, **_options: Any) -> Any:
        states = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
        if self.where == "before":
            return SimpleNamespace(logits=self.lm_head(states * 1.01))
        logits = self.lm_head(states)
        return SimpleNamespace(logits=logits + 1e-3 if self.where == "after" else logits[..., :-1])


TYPES = (torch.float32, torch.bfloat16, torch.float16)
HIDDEN = ("a cap far off", torch.float16)  # values of this dtype are too small to reach the cap


@pytest.mark.parametrize(("name", "dtype"), sorted(set(product(CASES, TYPES)) - {HIDDEN}, key=str), ids=str)
def test_an_operation_after_the_head_is_found_even_for_tiny_logits(name: str, dtype: torch.dtype) -> None:
    build, plain = CASES[name]
    model = build().eval().to(dtype)
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    assert plain_head(model) is plain
    assert not model.base_model._forward_hooks and not model.get_output_embeddings()._forward_hooks


@pytest.mark.parametrize("where", ["before", "after", "shape"])
def test_an_unknown_operation_is_found(where: str) -> None:
    model = Shifted(LlamaConfig(**SMALL)).eval()
    model.where = where
    assert not plain_head(model)


def test_a_model_that_calls_its_decoder_keeps_the_shortcut_where_it_is_used(tmp_path: Path) -> None:
    config = OPTConfig(**{**OPT.to_dict(), "return_dict": False})
    OPTForCausalLM(config).save_pretrained(tmp_path)
    policy = Policy.load(tmp_path)
    assert policy.linear_head and linear_head(policy.model)


class OtherInput(OPTForCausalLM):
    """Calls its head with another input than the hidden states of its base model."""

    def forward(self, input_ids: Any = None, **_options: Any) -> Any:
        states = self.model.decoder(input_ids=input_ids, use_cache=False).last_hidden_state
        return SimpleNamespace(logits=self.lm_head(states * 1.01))


def test_changed_hidden_states_are_found() -> None:
    assert not plain_head(OtherInput(OPT).eval())


def test_a_full_gpu_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_given: Any, **_options: Any) -> Any:
        raise torch.OutOfMemoryError

    model = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    monkeypatch.setattr(model, "forward", full)
    with pytest.raises(torch.OutOfMemoryError):
        plain_head(model)


def test_the_slow_path_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rollout_workers"):
        assert not Policy(CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.9))).linear_head
    # transformers may log too: whether its lines arrive depends on the tests before this one
    assert [record.message for record in caplog.records if record.name.startswith("rollout_workers")] == [
        "CohereForCausalLM computes its own logits: all of them are in memory, tokens x vocabulary"
    ]
