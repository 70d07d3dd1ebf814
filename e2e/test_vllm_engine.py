"""The engine `vllm` passes the conformance suite. Run by `make check-vllm` in vLLM's
environment, on a tiny model with merged projections and a padded vocabulary."""
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import vllm
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rollout_testing import enginetest
from rollout_workers.engines import registry
from rollout_workers.engines.base import Constraint, Engine, GroupRequest, SampleOutput, SamplingParams, WeightsSource
from rollout_workers.engines.errors import EngineClosed
from rollout_workers.engines.vllm.core import Settings
from rollout_workers.engines.vllm.engine import VllmEngine
from rollout_workers.weights import named_weights, read_manifest, weights_digest, write_weights

END = 256
MAX_LEN = 192


def model_of(seed: int, *, tied: bool) -> PreTrainedModel:
    """A random model over bytes."""
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
        max_position_embeddings=MAX_LEN,
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


class VllmHarness:
    """Version n has the random weights of seed n. Building an engine takes seconds, and a process
    can have one: cases share it as long as it is open."""

    capabilities = registry.ENGINES["vllm"].capabilities
    tolerance = gap = 1e-3
    slow = True
    seconds = 120

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models = [model_of(seed, tied=True) for seed in range(3)]
        self.models[0].save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        self.engine: VllmEngine | None = None

    @asynccontextmanager
    async def start(self, *, deterministic: bool = False) -> AsyncIterator[Engine]:
        assert not deterministic, "the engine does not declare determinism"
        if self.engine is not None:
            try:
                await self.engine.resume()
                await self.engine.stage_weights(dict(named_weights(self.models[0])))
                await self.engine.swap_weights(0)
                self.engine._scheduling._generated = 0  # the suite expects the counter of a new engine
            except EngineClosed:
                self.engine = None
        if self.engine is None:
            self.engine = VllmEngine(Settings(str(self.folder), "float32", enginetest.SLOTS, MAX_LEN), threads=1)
        yield self.engine

    async def close(self) -> None:
        if self.engine is not None:
            await self.engine.shutdown()

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
        return self.models[0](torch.tensor([list(tokens)])).logits[0].numpy()


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> VllmHarness:
    print(f"\nvLLM {vllm.__version__}, torch {torch.__version__}, transformers {transformers.__version__}")
    return VllmHarness(tmp_path_factory.mktemp("vllm"))


@pytest.mark.parametrize("case", enginetest.applicable(VllmHarness.capabilities))
async def test_vllm_conforms(case: str, harness: VllmHarness) -> None:
    await enginetest.run(case, harness)


async def test_the_digest_after_a_swap_is_the_one_of_the_published_folder(harness: VllmHarness, tmp_path: Path) -> None:
    published = tmp_path / "v7"
    write_weights(published, harness.models[2], config_source_dir=harness.folder, version=7)
    wanted = read_manifest(published).digest
    async with harness.start() as engine:
        assert await engine.stage_weights(str(published), wanted) == wanted
        await engine.swap_weights(7)
        assert await engine.weights_digest() == wanted


async def test_a_head_of_its_own_is_read_back(harness: VllmHarness, tmp_path: Path) -> None:
    untied = model_of(5, tied=False)
    untied.save_pretrained(tmp_path)
    await harness.close()
    engine = VllmEngine(Settings(str(tmp_path), "float32", 2, MAX_LEN, text=False), threads=1)
    try:
        tensors = dict(named_weights(untied))
        assert "lm_head.weight" in tensors and await engine.weights_digest() == weights_digest(tensors.items()).root
    finally:
        await engine.shutdown()


async def test_a_constraint_holds(harness: VllmHarness) -> None:
    async with harness.start() as engine:
        params = SamplingParams(40, stop=("never",), constraint=Constraint("regex", "[0-9]{3}-[a-f]{2}"))
        found = await enginetest.collect(engine, GroupRequest("a", (65,), (1, 2), params))
    for output in found.values():
        text = output.text or ""
        assert output.error is None and len(text) == 6 and text[3] == "-" and text[:3].isdigit(), text


async def test_a_continued_sample_equals_an_uninterrupted_one(harness: VllmHarness) -> None:
    params = SamplingParams(
        24, ignore_eos=True, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4, logit_bias=((65, 1.5),)
    )
    async with harness.start() as engine:
        whole = (await enginetest.collect(engine, GroupRequest("a", (65, 66), (3,), params)))["a", 0]
        rest = GroupRequest("b", (65, 66), (3,), params, continued=whole.token_ids[:10].tolist())
        output = (await enginetest.collect(engine, rest))["b", 0]
    assert output.token_ids.tolist() == whole.token_ids[10:].tolist()
    np.testing.assert_allclose(output.logprobs, whole.logprobs[10:], atol=1e-4)
