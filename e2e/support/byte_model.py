"""A tiny model over bytes for the tests of engines, and what a plain forward pass computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rollout_workers.engines.base import GroupRequest, SampleOutput, WeightsSource
from rollout_workers.weights import named_weights, weights_digest

END = 256
MAX_LEN = 192


def model_of(seed: int, *, tied: bool = True) -> PreTrainedModel:
    """A random model. Its projections are merged by vLLM and SGLang, and its vocabulary is not a
    multiple of 64, so they pad it."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=END + 1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=tied,
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
    )
    return Qwen3ForCausalLM(config).eval()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)} | {"<end>": END}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


class Versions:
    """The part of a ``Harness`` that is the same for every engine: version n has the random weights
    of seed n."""

    tolerance = gap = 1e-3
    seconds = 600

    def __init__(self) -> None:
        self.models = [model_of(seed) for seed in range(3)]

    def weights(self, version: int) -> tuple[WeightsSource, str]:
        tensors = dict(named_weights(self.models[version]))
        return tensors, weights_digest(tensors.items()).root

    @torch.no_grad()
    def expected(self, request: GroupRequest, output: SampleOutput, version: int) -> Any:
        ids = torch.tensor([[*request.prompt_ids, *output.token_ids.tolist()]])
        table = self.models[version](input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1].log_softmax(-1)
        return table[torch.arange(len(table)), torch.as_tensor(output.token_ids.astype(np.int64))].numpy()

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> Any:
        return self.models[0](input_ids=torch.tensor([list(tokens)])).logits[0].numpy()
