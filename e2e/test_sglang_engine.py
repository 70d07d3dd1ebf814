"""The engine `sglang` passes the conformance suite, and `SGLangWorker` behaves like RLinf's. Run by
`make check-sglang` in SGLang's environment, on a tiny model. A start of SGLang takes half a
minute, so the tests share one."""
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import pytest
import sglang
import torch
import transformers
from byte_model import MAX_LEN, Versions, byte_tokenizer

from rollout_testing import enginetest
from rollout_workers.engines import registry
from rollout_workers.engines.base import Constraint, Engine, GroupRequest, SampleOutput, SamplingParams
from rollout_workers.engines.errors import InvalidConstraint
from rollout_workers.engines.registry import LoadRequest
from rollout_workers.engines.served.engine import ServedEngine
from rollout_workers.engines.sglang import SequenceGroup, SGLangWorker
from rollout_workers.engines.sglang.engine import arguments
from rollout_workers.engines.sglang.server import Server
from rollout_workers.engines.sglang.worker import WeightReloadRefused
from rollout_workers.weights import named_weights, read_manifest, write_weights


class Shared(ServedEngine):
    """An engine that leaves its server to the next one."""

    def close(self) -> None:
        self._server.call(self._requests.end()).result(timeout=10)

    async def ready(self) -> None:
        """Undo what the last test may have left."""
        await self.onload()
        await self.resume()
        await self._ask(cast(Server, self._server).flush())


class SGLangHarness(Versions):
    """Version n has the random weights of seed n."""

    capabilities = registry.ENGINES["sglang"].capabilities

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.models[0].save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        self.request = LoadRequest(str(folder), 0, "float32", slots=enginetest.SLOTS, max_len=MAX_LEN)
        self.server = Server(arguments(self.request), threads=1)
        self.used = False

    @asynccontextmanager
    async def start(self, *, deterministic: bool = False) -> AsyncIterator[Engine]:
        assert not deterministic, "the engine does not declare determinism"
        engine = await asyncio.to_thread(
            Shared, self.server, str(self.folder), slots=enginetest.SLOTS, max_len=MAX_LEN, dtype="float32", version=0
        )
        if self.used:
            await engine.ready()
            await enginetest.swap(engine, self, 0)
            engine._requests.cache_epoch = 0
        self.used = True
        try:
            yield engine
        finally:
            await engine.resume()
            await engine.shutdown()

    def greedy(self, prompt: Sequence[int], tokens: int) -> list[int]:
        ids = list(prompt)
        for _ in range(tokens):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt) :]


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Any:
    versions = f"SGLang {sglang.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"\n{versions}, {platform.machine()}")
    found = SGLangHarness(tmp_path_factory.mktemp("sglang"))
    yield found
    children = [psutil.Process(pid) for pid in found.server.engine.get_all_child_pids()]
    found.server.close()
    found.server.close()
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children), "SGLang left processes"


@pytest.mark.parametrize("case", enginetest.applicable(registry.ENGINES["sglang"].capabilities))
async def test_sglang_conforms(case: str, harness: SGLangHarness) -> None:
    await enginetest.run(case, harness)


async def test_the_digest_after_a_swap_is_the_one_of_the_published_folder(harness: SGLangHarness, tmp_path: Path) -> None:
    published = tmp_path / "v7"
    write_weights(published, harness.models[2], config_source_dir=harness.folder, version=7)
    wanted = read_manifest(published).digest
    async with harness.start() as engine:
        assert await engine.stage_weights(str(published), wanted) == wanted
        await engine.swap_weights(7)
        assert await engine.weights_digest() == wanted


async def test_filters_renormalize_and_the_seed_decides(harness: SGLangHarness) -> None:
    params = SamplingParams(16, ignore_eos=True, temperature=0.7, top_k=12, top_p=0.8, min_p=0.05)
    async with harness.start() as engine:
        found = await enginetest.collect(engine, GroupRequest("a", (65, 66), (1, 2, 1), params))
    assert found["a", 0].token_ids.tolist() == found["a", 2].token_ids.tolist() != found["a", 1].token_ids.tolist()
    for output in found.values():
        logits = harness.logits([65, 66, *output.token_ids.tolist()])[1:-1] / 0.7
        for row, token, logprob in zip(logits, output.token_ids, output.logprobs, strict=True):
            probs = np.exp(row - row.max())
            order = np.argsort(-probs)
            kept = probs[order[:12]] / probs[order[:12]].sum()
            kept = kept[np.cumsum(kept) - kept < 0.8]
            kept = kept[kept >= kept[0] * 0.05]
            at = order.tolist().index(token)
            np.testing.assert_allclose(logprob, np.log(kept[at] / kept.sum()), atol=1e-3)


async def test_a_stop_string_ends_a_stream(harness: SGLangHarness) -> None:
    async with harness.start() as engine:
        asked = GroupRequest("a", (65,), (3,), SamplingParams(24, ignore_eos=True), stream=True)
        whole = (await enginetest.collect(engine, asked))["a", 0]
        text = whole.text or ""
        stop = text[6:8]
        params = SamplingParams(24, ignore_eos=True, stop=(stop,))
        pieces = [item async for item in engine.generate([GroupRequest("b", (65,), (3,), params, stream=True)])]
    output = pieces[-1]
    assert isinstance(output, SampleOutput) and output.finish_reason == "stop" and output.stop_string == stop
    streamed = "".join(item.text for item in pieces[:-1] if not isinstance(item, SampleOutput))
    assert output.text == text[: text.index(stop)] == streamed
    assert output.token_ids.tolist() == whole.token_ids[: len(output.token_ids)].tolist()


async def test_a_constraint_holds(harness: SGLangHarness) -> None:
    async with harness.start() as engine:
        params = SamplingParams(40, stop=("never",), constraint=Constraint("regex", "[0-9]{3}-[a-f]{2}"))
        found = await enginetest.collect(engine, GroupRequest("a", (65,), (1, 2), params))
        broken = SamplingParams(4, constraint=Constraint("regex", "("))
        refused = (await enginetest.collect(engine, GroupRequest("b", (65,), (1,), broken)))["b", 0]
    for output in found.values():
        text = output.text or ""
        assert output.error is None and len(text) == 6 and text[3] == "-" and text[:3].isdigit(), text
    assert refused.finish_reason == "error" and isinstance(refused.error, InvalidConstraint)


# ---- SGLangWorker ------------------------------------------------------------------------------


def settings(folder: Path, **rollout: Any) -> SimpleNamespace:
    sampling = SimpleNamespace(do_sample=True, temperature=1.0, top_k=-1, top_p=1.0, repetition_penalty=1.0, max_new_tokens=150)
    model = SimpleNamespace(model_path=str(folder), precision="fp32")
    values = {"model": model, "sampling_params": sampling, "max_running_requests": 4, "max_model_len": MAX_LEN, "threads": 1}
    return SimpleNamespace(rollout=SimpleNamespace(**(values | rollout)))


async def test_the_worker_follows_the_learner(harness: SGLangHarness) -> None:
    """One start: dummy weights, a sync in buckets, generation, an abort, and the rest of a
    group."""
    ranks: list[tuple[int, int]] = []

    async def buckets(rank: int, world_size: int) -> AsyncIterator[dict[str, torch.Tensor]]:
        ranks.append((rank, world_size))
        tensors = list(named_weights(harness.models[1]))
        for start in range(0, len(tensors), 5):
            yield dict(tensors[start : start + 5])

    placement = SimpleNamespace(is_collocated=True, weight_buckets=buckets)
    worker = SGLangWorker(settings(harness.folder), placement)
    await worker.init_worker()
    children = worker._engine.get_all_child_pids()
    try:
        assert worker._offloaded
        await worker.offload_engine()
        await worker.sync_model_from_actor()
        assert ranks == [(0, 1)]
        transport = {name: "float32" for name, _ in named_weights(harness.models[1])}
        assert worker._server is not None
        assert await asyncio.to_thread(worker._server.digest, transport) == harness.weights(1)[1]
        with pytest.raises(WeightReloadRefused):
            await worker.onload_engine()

        params = {"max_new_tokens": 4, "temperature": 0}
        one, info = await worker.async_generate(input_ids=[65, 66], sampling_params=params, image_data=[None], request_info=7)
        assert one["input_ids"] == [65, 66] and len(one["output_ids"]) == 4 and info == 7
        many, _ = await worker.async_generate(input_ids=[[65, 66]], sampling_params=params, return_logprob=True)
        assert isinstance(many, list) and many[0]["input_ids"] == [65, 66] and many[0]["output_ids"] == one["output_ids"]
        text, _ = await worker.async_generate(prompt="AB", sampling_params=params)
        assert text["input_ids"] == byte_tokenizer()("AB")["input_ids"]

        group = SequenceGroup([65, 66, 67], 3)
        running = asyncio.create_task(worker.generate_group(group))
        await asyncio.sleep(0.5)
        partial = await worker.abort_generation()
        await running
        assert {result["meta_info"]["finish_reason"]["type"] for result in partial} == {"abort"} and not group.all_completed
        assert await worker.abort_generation() == []
        while not group.all_completed:
            await worker.generate_group(group)
        ids = set()
        for result in group.results:
            assert result is not None
            meta = result["meta_info"]
            assert len(result["output_ids"]) == len(meta["output_token_logprobs"]) == meta["completion_tokens"] <= 150
            assert [pair[1] for pair in meta["output_token_logprobs"]] == result["output_ids"]
            assert meta["weight_versions"][-1]["end"] == len(result["output_ids"])
            assert meta["finish_reason"]["type"] in ("length", "stop")
            ids.add(tuple(result["output_ids"]))
        assert len(ids) == 3, "the samples of a group are copies"
    finally:
        worker.shutdown()
        worker.shutdown()
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in children)


async def test_a_worker_keeps_its_weights_on_the_host(harness: SGLangHarness) -> None:
    worker = SGLangWorker(settings(harness.folder), SimpleNamespace(is_collocated=False), "cpu")
    await worker.init_worker()
    try:
        params = {"max_new_tokens": 6, "temperature": 0}
        before, _ = await worker.async_generate(input_ids=[65, 66], sampling_params=params)
        for _ in range(2):
            await worker.offload_engine()
        for _ in range(2):
            await worker.onload_engine()
        after, _ = await worker.async_generate(input_ids=[65, 66], sampling_params=params)
        assert before["output_ids"] == after["output_ids"] == harness.greedy([65, 66], 6)
        with pytest.raises(WeightReloadRefused):
            await worker.sync_model_from_actor()
    finally:
        worker.shutdown()


def test_a_model_that_sglang_lacks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "no_such"}')
    with pytest.raises(Exception, match=r"no_such|NoSuchModel"):
        registry.load("sglang", LoadRequest(str(tmp_path), 0, "float32", slots=1, max_len=32))
    assert os.getpid()  # SGLang's processes did not end this one
