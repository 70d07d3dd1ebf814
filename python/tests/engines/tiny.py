"""A tiny model, a byte tokenizer, and the plain forward with which engines are compared. Nothing is
downloaded."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rollout_workers.engines.base import GroupRequest, SampleOutput, SamplingParams
from rollout_workers.engines.transformers import EngineConfig, TransformersEngine

END = 256
VOCABULARY = 257


def tiny_model(seed: int = 0, scale: float = 0.2) -> Qwen3ForCausalLM:
    """A random Qwen3 over bytes. ``scale``: the spread of the weights; larger values give sharper
    distributions."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        initializer_range=scale,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
    )
    return Qwen3ForCausalLM(config).eval()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte, so that a non-ASCII character spans tokens. id: index in
    the byte alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate(alphabet)} | {"<end>": END}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


@asynccontextmanager
async def running(
    model: PreTrainedModel | None = None, *, text: bool = False, version: int = 0, **config: Any
) -> AsyncIterator[TransformersEngine]:
    """An engine that is shut down after the test."""
    sizes: dict[str, Any] = {"slots": 8, "max_len": 64, "threads": 1} | config
    engine = TransformersEngine(
        model or tiny_model(), EngineConfig(**sizes), tokenizer=byte_tokenizer() if text else None, version=version
    )
    try:
        yield engine
    finally:
        await engine.shutdown()


def request(
    name: str,
    length: int = 6,
    seeds: Sequence[int] = (1,),
    prompt: Sequence[int] | np.ndarray | None = None,
    stream: bool = False,
    **params: Any,
) -> GroupRequest:
    """A request with a random prompt of ``length`` ids, which depends only on the name."""
    ids = np.random.default_rng(list(name.encode())).integers(0, 256, length) if prompt is None else prompt
    chosen: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True} | params
    return GroupRequest(name, tuple(int(i) for i in ids), tuple(seeds), SamplingParams(**chosen), stream)


async def outputs(engine: TransformersEngine, *batch: GroupRequest) -> dict[tuple[str, int], SampleOutput]:
    """Every output of a batch by request and sample."""
    found = {}
    async for item in engine.generate(batch):
        if isinstance(item, SampleOutput):
            assert (item.request_id, item.sample) not in found, "a sample was delivered twice"
            found[item.request_id, item.sample] = item
    return found


@torch.no_grad()
def plain_logits(model: torch.nn.Module, prompt: Sequence[int] | np.ndarray, tokens: Sequence[int] | np.ndarray) -> torch.Tensor:
    """Logits [T, V] of the module's own forward for each of ``tokens``."""
    ids = torch.tensor([[*prompt, *(int(t) for t in tokens)]]).to(model.device)
    return model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().cpu()


def plain_logprobs(model: torch.nn.Module, prompt: Sequence[int] | np.ndarray, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Raw logprobs f32[T] of ``tokens`` by the module's own forward."""
    table = plain_logits(model, prompt, tokens).log_softmax(-1)
    return table[torch.arange(len(table)), torch.as_tensor(np.asarray(tokens, np.int64))].numpy()


def same_bits(a: SampleOutput, b: SampleOutput) -> bool:
    """Whether two outputs have the same tokens and logprobs, bit for bit."""
    return all(getattr(a, name).tobytes() == getattr(b, name).tobytes() for name in ("token_ids", "logprobs", "raw_logprobs"))
