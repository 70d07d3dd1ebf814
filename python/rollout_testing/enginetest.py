"""The conformance suite that every engine passes.

    HARNESS = ...                                          # implements Harness

    @pytest.mark.parametrize("case", applicable(HARNESS.capabilities))
    async def test_engine(case: str) -> None:
        await run(case, HARNESS)

A case names the capabilities that it needs; ``applicable`` leaves out those that an engine does not
declare. ``raw_logprobs`` and ``prompt_logprobs`` are checked in both directions: an engine must not
report what it does not declare.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pytest

from rollout_workers.engines.base import (
    Engine,
    GroupRequest,
    Logprobs,
    SampleOutput,
    SamplingParams,
    WeightsSource,
)
from rollout_workers.engines.errors import DuplicateRequest, EngineClosed, NothingStaged
from rollout_workers.engines.registry import Capabilities

SLOTS = 4
PROMPT = (65, 66, 67, 68)


class Harness(Protocol):
    """An engine under test. Its token ids are below 256 and its context holds at least 128
    tokens."""

    capabilities: Capabilities

    def start(self, *, deterministic: bool = False) -> AbstractAsyncContextManager[Engine]:
        """An engine with ``SLOTS`` slots and the weights of version 0, shut down on exit. A sample
        of 64 tokens takes long enough for another call to reach the engine before it ends."""
        ...

    def weights(self, version: int) -> tuple[WeightsSource, str]:
        """Weights of version 1 or 2, which differ from version 0, and their digest."""
        ...

    def expected(self, request: GroupRequest, output: SampleOutput, version: int) -> Logprobs:
        """f32[T]: the logprobs of the output's tokens by the model's softmax, from a plain forward
        pass with weights ``version``."""
        ...

    def greedy(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """The most likely continuation under version 0, by a plain forward pass."""
        ...


Check = Callable[[Harness], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Case:
    check: Check
    needs: tuple[str, ...]


CASES: dict[str, _Case] = {}


def case(*needs: str) -> Callable[[Check], Check]:
    """Register a check. needs: capabilities without which it does not apply."""

    def register(check: Check) -> Check:
        CASES[check.__name__] = _Case(check, needs)
        return check

    return register


def applicable(capabilities: Capabilities) -> list[str]:
    """The cases that apply to an engine."""
    return [name for name, found in CASES.items() if all(getattr(capabilities, need) for need in found.needs)]


async def run(name: str, harness: Harness) -> None:
    """Run one case."""
    async with asyncio.timeout(60):
        await CASES[name].check(harness)


def request(name: str, *, seeds: Sequence[int] = (1,), tokens: int = 8, prompt: Sequence[int] = PROMPT, temperature: float = 1.0,
            ) -> GroupRequest:  # fmt: skip
    """A request of the suite."""
    return GroupRequest(name, tuple(prompt), tuple(seeds), SamplingParams(tokens, temperature, ignore_eos=True))


async def collect(engine: Engine, *batch: GroupRequest) -> dict[tuple[str, int], SampleOutput]:
    """Every output by request and sample. Fails if one is delivered twice."""
    found: dict[tuple[str, int], SampleOutput] = {}
    async for item in engine.generate(batch):
        if isinstance(item, SampleOutput):
            key = item.request_id, item.sample
            assert key not in found, f"{key} was delivered twice"
            found[key] = item
    assert set(found) == {(r.request_id, n) for r in batch for n in range(len(r.seeds))}, "a sample was not delivered"
    return found


def same(a: SampleOutput, b: SampleOutput) -> bool:
    """Whether tokens and logprobs are equal, bit for bit."""
    return a.token_ids.tobytes() == b.token_ids.tobytes() and a.logprobs.tobytes() == b.logprobs.tobytes()


def check_shape(output: SampleOutput, capabilities: Capabilities) -> None:
    """Check the lengths of arrays, the gaps between spans, and raw logprobs as declared."""
    count = len(output.token_ids)
    assert output.token_ids.dtype == np.int32 and output.logprobs.dtype == np.float32 and len(output.logprobs) == count
    assert (output.raw_logprobs is not None) == capabilities.raw_logprobs
    assert output.raw_logprobs is None or len(output.raw_logprobs) == count
    ends = [0, *(span.end for span in output.version_spans)]
    assert ends[-1] == count and all(span.start == end for span, end in zip(output.version_spans, ends, strict=False))


def model_logprobs(output: SampleOutput) -> Logprobs:
    """Logprobs by the model's softmax. At temperature 1 without filters both modes report them."""
    return output.logprobs if output.raw_logprobs is None else output.raw_logprobs


async def idle(engine: Engine) -> None:
    """Wait until all slots of the engine are free."""
    while (stats := engine.stats()).active or stats.queued:
        await asyncio.sleep(0.005)


async def swap(engine: Engine, harness: Harness, version: int) -> str:
    """Stage and swap weights. Returns their digest."""
    source, digest = harness.weights(version)
    assert await engine.stage_weights(source, digest) == digest
    await engine.swap_weights(version)
    return digest


@case()
async def logprobs_equal_a_plain_forward_pass(harness: Harness) -> None:
    wanted = [request("a", seeds=(1, 2, 3)), request("b", prompt=(70, 71), seeds=(4,))]
    async with harness.start() as engine:
        found = await collect(engine, *wanted)
    for asked in wanted:
        for sample in range(len(asked.seeds)):
            output = found[asked.request_id, sample]
            check_shape(output, harness.capabilities)
            np.testing.assert_allclose(model_logprobs(output), harness.expected(asked, output, 0), atol=1e-4)


@case("greedy")
async def greedy_takes_the_most_likely_token(harness: Harness) -> None:
    async with harness.start() as engine:
        found = await collect(engine, request("a", temperature=0, tokens=12))
    assert found["a", 0].token_ids.tolist() == harness.greedy(PROMPT, 12)


@case()
async def seeds_reproduce_and_differ(harness: Harness) -> None:
    async with harness.start() as engine:
        first = await collect(engine, request("a", seeds=(1, 2, 1), tokens=16))
        again = await collect(engine, request("b", seeds=(1,), tokens=16))
    tokens = [first["a", n].token_ids.tolist() for n in range(3)]
    assert tokens[0] == tokens[2] == again["b", 0].token_ids.tolist() != tokens[1]


@case("deterministic")
async def deterministic_bits_do_not_depend_on_other_requests(harness: Harness) -> None:
    async with harness.start(deterministic=True) as engine:
        alone = (await collect(engine, request("a", seeds=(7,))))["a", 0]
        others = [request(f"other-{n}", prompt=(80 + n, 81), seeds=(n,), tokens=5 + n) for n in range(6)]
        crowded = await collect(engine, *others, request("a", seeds=(7,)))
    assert same(alone, crowded["a", 0])


@case()
async def an_aborted_request_delivers_each_sample_once(harness: Harness) -> None:
    """Aborts in each phase: waiting for a slot, decoding, finished."""
    async with harness.start() as engine:
        await engine.pause()
        running = asyncio.create_task(collect(engine, *(request(f"queued-{n}", seeds=(1, 2, 3), tokens=64) for n in range(4))))
        await asyncio.sleep(0.02)
        assert await engine.abort(["queued-3", "unknown", "queued-3"]) == ("queued-3",)
        await engine.resume()
        await asyncio.sleep(0.02)
        decoding = await engine.abort([f"queued-{n}" for n in range(3)])
        found = await running
        assert {found["queued-3", n].finish_reason for n in range(3)} == {"aborted"}
        for (name, _), output in found.items():
            check_shape(output, harness.capabilities)
            assert output.finish_reason in ("length", "stop", "aborted")
            assert name in (*decoding, "queued-3") or output.finish_reason != "aborted"
        assert await engine.abort(["queued-0"]) == ()
        await idle(engine)


@case()
async def closing_the_iterator_frees_the_slots(harness: Harness) -> None:
    async with harness.start() as engine:
        task = asyncio.create_task(collect(engine, request("a", seeds=tuple(range(8)), tokens=64)))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await idle(engine)
        assert await collect(engine, request("a"))


@case()
async def random_aborts_leak_no_slot(harness: Harness) -> None:
    random_ = random.Random(0)
    async with harness.start() as engine:
        batches = [
            [request(f"{n}/{i}", seeds=tuple(range(random_.randint(1, 3))), tokens=random_.randint(1, 24)) for i in range(4)]
            for n in range(12)
        ]
        tasks = [asyncio.create_task(collect(engine, *batch)) for batch in batches]
        for _ in range(40):
            await asyncio.sleep(0.001)
            await engine.abort([random_.choice(random_.choice(batches)).request_id])
        for found in await asyncio.gather(*tasks):
            for output in found.values():
                check_shape(output, harness.capabilities)
        await idle(engine)
        full = await collect(engine, request("after", seeds=tuple(range(2 * SLOTS))))
        assert all(output.finish_reason != "aborted" for output in full.values())


@case()
async def a_swap_changes_version_and_digest(harness: Harness) -> None:
    async with harness.start() as engine:
        before = await engine.weights_digest()
        digest = await swap(engine, harness, 1)
        assert digest != before and await engine.weights_digest() == digest and engine.stats().version == 1
        found = await collect(engine, request("a"))
        await engine.swap_weights(1)  # the current version: nothing happens
        with pytest.raises(NothingStaged):
            await engine.swap_weights(2)
        assert await engine.weights_digest() == digest
    assert [span.version for span in found["a", 0].version_spans] == [1]


@case()
async def nothing_of_old_weights_is_reused(harness: Harness) -> None:
    """Samples a prompt again after a swap, and in a group during a swap. New samples must not use
    the KV of old weights."""
    asked = request("a", seeds=(1, 2))
    async with harness.start() as engine:
        epoch = engine.stats().cache_epoch
        before = await collect(engine, asked)
        await swap(engine, harness, 1)
        assert engine.stats().cache_epoch > epoch
        after = await collect(engine, asked)
        tokens = engine.stats().generated_tokens
        divided = asyncio.create_task(collect(engine, request("b", seeds=tuple(range(3 * SLOTS)))))
        while engine.stats().generated_tokens == tokens:
            await asyncio.sleep(0)
        await engine.pause()
        await swap(engine, harness, 2)
        await engine.resume()
        found = await divided
    assert not any(same(before[key], after[key]) for key in before)
    for output, version in [(after["a", 0], 1), *((output, 2) for output in found.values())]:
        if {span.version for span in output.version_spans} == {version}:
            np.testing.assert_allclose(
                model_logprobs(output), harness.expected(asked_for(output, asked), output, version), atol=1e-4
            )
    assert {span.version for span in found["b", 3 * SLOTS - 1].version_spans} == {2}


def asked_for(output: SampleOutput, asked: GroupRequest) -> GroupRequest:
    """The request of an output of the suite. All requests have the same prompt."""
    seeds = asked.seeds if output.request_id == asked.request_id else tuple(range(3 * SLOTS))
    return GroupRequest(output.request_id, asked.prompt_ids, seeds, asked.params)


@case("swaps_in_flight")
async def a_swap_in_flight_starts_a_version_span(harness: Harness) -> None:
    async with harness.start() as engine:
        running = asyncio.create_task(collect(engine, request("a", tokens=100)))
        while not engine.stats().generated_tokens:
            await asyncio.sleep(0.001)
        await engine.pause()
        await swap(engine, harness, 1)
        await engine.resume()
        output = (await running)["a", 0]
    check_shape(output, harness.capabilities)
    assert [span.version for span in output.version_spans] == [0, 1]


@case()
async def pause_and_resume_may_be_repeated(harness: Harness) -> None:
    async with harness.start() as engine:
        for _ in range(2):
            await engine.pause()
        assert engine.stats().paused
        running = asyncio.create_task(collect(engine, request("a")))
        done, _ = await asyncio.wait({running}, timeout=0.05)
        assert not done
        for _ in range(2):
            await engine.resume()
        assert await running and not engine.stats().paused


@case("prompt_logprobs")
async def prompts_are_scored(harness: Harness) -> None:
    async with harness.start() as engine:
        found = await engine.prompt_logprobs(np.array(PROMPT, np.int32))
        more = await engine.prompt_logprobs(np.array(PROMPT, np.int32), top=3)
    assert found.logprobs.dtype == np.float32 and len(found.logprobs) == len(PROMPT)
    assert found.logprobs[0] == 0 and (found.logprobs[1:] < 0).all() and found.top is None
    assert more.top is not None and more.top.token_ids.dtype == np.int32 and more.top.logprobs.dtype == np.float32
    assert more.top.token_ids.shape == more.top.logprobs.shape == (len(PROMPT), 3)
    assert (more.top.token_ids[0] == -1).all() and (np.diff(more.top.logprobs[1:]) <= 0).all()


@case()
async def a_request_id_in_flight_is_refused(harness: Harness) -> None:
    async with harness.start() as engine:
        await engine.pause()
        running = asyncio.create_task(collect(engine, request("a")))
        await asyncio.sleep(0.02)
        with pytest.raises(DuplicateRequest):
            await collect(engine, request("a"))
        await engine.resume()
        await running


@case()
async def a_closed_engine_refuses_requests(harness: Harness) -> None:
    async with harness.start() as engine:
        await engine.shutdown()
        await engine.shutdown()
        with pytest.raises(EngineClosed):
            await collect(engine, request("a"))
