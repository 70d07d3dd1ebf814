"""Reused KV of earlier prompts and samples, and long prompts that are computed in parts."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from rollout_workers.engines.base import GroupRequest, SampleDelta, SampleOutput
from rollout_workers.engines.transformers import TransformersEngine
from rollout_workers.engines.transformers.llama import LlamaForward
from rollout_workers.engines.transformers.prefixes import BLOCK, Prefixes
from rollout_workers.weights import named_weights

from .test_generate import MODELS
from .tiny import outputs, plain_logprobs, running, same_bits, tiny_model
from .tiny import request as request_without_session


def request(*given, **more) -> GroupRequest:
    return replace(request_without_session(*given, **more), session="s")


def ids(*parts: tuple[int, int]) -> np.ndarray:
    """Random ids: for each part (seed, count)."""
    return np.concatenate([np.random.default_rng(seed).integers(0, 256, count) for seed, count in parts])


def kv(tokens: np.ndarray) -> torch.Tensor:
    """Four bytes per token."""
    return torch.from_numpy(tokens.astype(np.float32))[None, :, None, None, None]


def test_the_longest_common_beginning_is_found() -> None:
    known = Prefixes(10_000)
    for tokens in (ids((1, 40)), ids((1, 20), (2, 30)), ids((1, 16), (3, 20)), ids((4, BLOCK - 1))):
        known.keep(tokens, kv(tokens))
    for tokens, count in ((ids((1, 20), (2, 25), (5, 9)), 45), (ids((1, 39), (6, 9)), 39), (ids((1, 16), (7, 9)), 16)):
        found = known.find(tokens)
        assert found is not None and found[1] == count == found[0].common(tokens)
        assert torch.equal(found[0].kv[0, :count, 0, 0, 0], torch.from_numpy(tokens[:count].astype(np.float32)))
    assert known.find(ids((8, 40))) is None and known.find(ids((1, 15), (9, 20))) is None
    assert known.find(ids((4, BLOCK - 1))) is None
    known.clear()
    assert known.find(ids((1, 40))) is None


def test_the_prefix_that_was_not_used_for_longest_is_dropped() -> None:
    known = Prefixes(3 * 32 * 4)
    for seed in range(3):
        known.keep(ids((seed, 32)), kv(ids((seed, 32))))
    assert known.find(ids((0, 32))) is not None
    known.keep(ids((3, 32)), kv(ids((3, 32))))
    assert [known.find(ids((seed, 32))) is not None for seed in range(4)] == [True, False, True, True]
    known.keep(ids((3, 32), (4, 64)), kv(ids((3, 32), (4, 64))))  # replaces its beginning, and everything else
    assert [known.find(ids((seed, 32))) is not None for seed in range(4)] == [False, False, False, True]


def check(asked: GroupRequest, output: SampleOutput, model: torch.nn.Module | None = None) -> None:
    """Compare the output's logprobs with a plain forward."""
    expected = plain_logprobs(model or tiny_model(), asked.prompt_ids, output.token_ids)
    np.testing.assert_allclose(output.raw_logprobs, expected, atol=1e-4)


async def turns(engine: TransformersEngine, session: int, count: int) -> tuple[int, list]:
    """A session of ``count`` turns of 20 new tokens each. Returns the number of new prompt tokens,
    and its requests with their outputs."""
    prompt, found, new = ids((0, 32)), [], 32
    for turn in range(count):
        prompt, new = np.concatenate((prompt, ids((100 * session + turn + 1, 20)))), new + 20
        asked = replace(request(f"{session}/{turn}", seeds=(session,), prompt=prompt, max_tokens=12), session=f"{session}")
        output = (await outputs(engine, asked))[asked.request_id, 0]
        found.append((asked, output))
        prompt = np.concatenate((prompt, output.token_ids))
    return new, found


async def test_sessions_compute_only_new_tokens() -> None:
    """64 sessions of 5 turns. The last token of a sample is new, because nothing was sampled after
    it."""
    async with running(slots=64, max_len=256) as engine:
        runs = await asyncio.gather(*(turns(engine, session, 5) for session in range(64)))
        stats = engine.stats()
    new = sum(count for count, _ in runs)
    assert stats.prefilled_tokens <= 1.1 * new and stats.prompt_tokens > 2.5 * new
    assert stats.prompt_tokens - stats.prefilled_tokens == sum(o.cached_tokens for _, found in runs for _, o in found)
    for _, found in runs[::16]:
        for asked, output in found:
            check(asked, output)


async def test_requests_with_a_common_beginning_share_it_and_without_memory_they_do_not() -> None:
    batch = [request(f"{n}", prompt=ids((1, 40), (n, 5)), seeds=(1, 2)) for n in range(2, 6)]
    for memory, cached in ((None, 40), (0, 0)):
        async with running(prefix_bytes=memory) as engine:
            await outputs(engine, request("first", prompt=ids((1, 40))))
            found = await outputs(engine, *batch)
        assert {output.cached_tokens for output in found.values()} == {cached}
        for asked in batch:
            output = found[asked.request_id, 1]
            check(asked, output)


async def test_nothing_is_kept_of_requests_without_a_session() -> None:
    async with running() as engine:
        for _ in range(2):
            output = (await outputs(engine, request_without_session("a", length=40)))["a", 0]
            assert not output.cached_tokens


@pytest.mark.parametrize("policy", ["keep", "recompute"])
async def test_after_a_swap_nothing_of_older_weights_is_used(policy: str) -> None:
    """Also not the KV of a sample that began before the swap and ended after it."""
    new, long = tiny_model(1), request("long", prompt=ids((1, 40)), max_tokens=60, stream=True)
    async with running(kv_on_swap=policy, max_len=128, text=True) as engine:
        await outputs(engine, request("prompt", prompt=ids((2, 40))))
        items = engine.generate([long])
        for _ in range(3):
            await anext(items)
        await engine.pause()
        waits = asyncio.create_task(outputs(engine, request("part", prompt=ids((2, 40), (3, 4)))))
        await asyncio.sleep(0.01)
        await engine.stage_weights({name: tensor.clone() for name, tensor in named_weights(new)})
        await engine.swap_weights(1)
        await engine.resume()
        mixed = [item async for item in items][-1]
        assert isinstance(mixed, SampleOutput)
        again = request("again", prompt=np.concatenate((ids((1, 40)), mixed.token_ids, [5])))
        asked = [again, request("part", prompt=ids((2, 40), (3, 4)))]
        found = await waits | await outputs(engine, asked[0])
    assert [span.version for span in mixed.version_spans] == [0, 1]
    for one in asked:
        output = found[one.request_id, 0]
        assert not output.cached_tokens
        check(one, output, new)


async def test_deterministic_mode_reuses_whole_prompts_with_the_same_bits() -> None:
    async with running(deterministic=True, max_len=128) as engine:
        first = await outputs(engine, request("a", length=40, seeds=(1, 2)))
        again = await outputs(engine, request("a", length=40, seeds=(1, 2)))
        longer = await outputs(engine, request("b", prompt=[*request("a", length=40).prompt_ids, 5]))
    assert all(same_bits(first[key], again[key]) for key in first)
    assert {o.cached_tokens for o in again.values()} == {40} and {
        o.cached_tokens for o in (*first.values(), *longer.values())
    } == {0}


@pytest.mark.parametrize("name", MODELS)
async def test_a_prompt_in_parts_equals_a_plain_forward(name: str) -> None:
    torch.manual_seed(1)
    model = MODELS[name]().eval()
    batch = [request(f"r{n}", length=length, seeds=(1, 2), max_tokens=6) for n, length in enumerate((3, 8, 9, 21, 40, 50))]
    async with running(model, chunk_tokens=8) as engine:
        assert engine._thread.decoder.forward.extends
        found = await outputs(engine, *batch)
        assert engine.stats().prefilled_tokens == sum(len(r.prompt_ids) for r in batch)
    for asked in batch:
        output = found[asked.request_id, 1]
        check(asked, output, model)


async def test_the_bits_of_a_prompt_in_parts_do_not_depend_on_other_requests() -> None:
    async with running(deterministic=True, chunk_tokens=8, max_len=128) as engine:
        alone = await outputs(engine, request("a", length=61, seeds=(1, 2)))
        others = [request(f"n{n}", length=5 + 17 * n, seeds=(n,), max_tokens=4 + n) for n in range(6)]
        crowded = await outputs(engine, *others, request("a", length=61, seeds=(1, 2)))
    async with running(deterministic=True, chunk_tokens=8, max_len=128) as engine:
        behind = await outputs(engine, *others, request("a", length=61, seeds=(1, 2)))
    assert all(same_bits(alone[key], crowded[key]) and same_bits(alone[key], behind[key]) for key in alone)


async def test_others_decode_while_a_long_prompt_is_computed() -> None:
    async with running(chunk_tokens=8, max_len=128, text=True) as engine:
        await engine.pause()
        batch = [request("long", length=80, stream=True, max_tokens=4), request("short", stream=True, max_tokens=60)]
        order: list[str] = []

        async def read() -> None:
            order.extend([item.request_id async for item in engine.generate(batch) if isinstance(item, SampleDelta)])

        reading = asyncio.create_task(read())
        await asyncio.sleep(0.01)
        await engine.resume()
        await reading
    assert 8 <= order.index("long") <= 12 and len(order) == 64


async def test_a_forward_that_differs_in_parts_computes_prompts_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    extend = LlamaForward.extend
    monkeypatch.setattr(LlamaForward, "extend", lambda *given: extend(*given) * 1.5)
    async with running(chunk_tokens=8) as engine:
        for _ in range(2):
            output = (await outputs(engine, request("a", length=40)))["a", 0]
            assert not output.cached_tokens
    check(request("a", length=40), output)
