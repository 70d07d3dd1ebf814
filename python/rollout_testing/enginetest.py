"""The conformance suite that every engine passes.

    class MyHarness(Harness): ...

    HARNESS = MyHarness()

    @pytest.mark.parametrize("case", CASES)
    async def test_engine(case: str) -> None:
        await run(case, HARNESS)

A case names the capabilities that it needs. ``run`` skips a case if the engine does not declare
one, and ``applicable`` leaves it out. ``raw_logprobs`` and ``prompt_logprobs`` are checked in both
directions: an engine must not report what it does not declare.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from rollout_workers.engines.base import (
    Constraint,
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
    """An engine under test. Its token ids are below 256 and its context holds at least 128 tokens.
    It has a tokenizer if it declares constraints.

    tolerance: maximum difference of logprobs from a plain forward pass. gap: difference of the two
    largest logits below which greedy sampling may take either. seconds: maximum duration of a
    case.
    """

    capabilities: Capabilities
    tolerance: float = 1e-3
    gap: float = 1e-3
    seconds: int = 60

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

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """f32[T, V]: the logits after each of the tokens under version 0, from a plain forward
        pass. Only for engines that declare ``greedy``."""
        ...


Check = Callable[[Harness], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Case:
    check: Check
    needs: tuple[str, ...]


CASES: dict[str, _Case] = {}


def case(*needs: str) -> Callable[[Check], Check]:
    """Register a check. needs: capabilities without which it does not apply; ``parameters.NAME`` is
    one of the supported parameters."""

    def register(check: Check) -> Check:
        CASES[check.__name__] = _Case(check, needs)
        return check

    return register


def missing(name: str, capabilities: Capabilities) -> list[str]:
    """The capabilities that a case needs and an engine does not declare."""

    def declared(need: str) -> bool:
        field, _, item = need.partition(".")
        value = getattr(capabilities, field)
        return item in value if item else bool(value)

    return [need for need in CASES[name].needs if not declared(need)]


def applicable(capabilities: Capabilities) -> list[str]:
    """The cases that apply to an engine."""
    return [name for name in CASES if not missing(name, capabilities)]


async def run(name: str, harness: Harness) -> None:
    """Run one case. Skips it if the engine does not declare a capability that it needs."""
    if lacking := missing(name, harness.capabilities):
        pytest.skip(f"the engine does not declare {', '.join(lacking)}")
    async with asyncio.timeout(harness.seconds):
        await CASES[name].check(harness)


def request(name: str, *, seeds: Sequence[int] = (1,), tokens: int = 8, prompt: Sequence[int] = PROMPT,
            continued: Sequence[int] = (), **params: Any) -> GroupRequest:  # fmt: skip
    """A request of the suite."""
    chosen = SamplingParams(tokens, **({"temperature": 1.0, "ignore_eos": True} | params))
    return GroupRequest(name, tuple(prompt), tuple(seeds), chosen, continued=tuple(continued))


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
            np.testing.assert_allclose(model_logprobs(output), harness.expected(asked, output, 0), atol=harness.tolerance)


def check_greedy(harness: Harness, ids: Sequence[int], logits: NDArray[np.float32]) -> None:
    """Check that the ids are the maxima of the rows of logits [T, V], up to the first row whose two
    largest logits are closer than the gap."""
    for at, (token, row) in enumerate(zip(ids, logits, strict=True)):
        second, first = np.sort(row)[-2:]
        if first - second < harness.gap:
            return
        assert token == row.argmax(), f"token {at} is {token}, but {row.argmax()} has the largest logit"


def logits_of(harness: Harness, asked: GroupRequest, output: SampleOutput) -> NDArray[np.float32]:
    """f32[T, V]: the logits of which each token of the output was sampled, under version 0."""
    before = [*asked.prompt_ids, *asked.continued]
    return harness.logits([*before, *output.token_ids.tolist()])[len(before) - 1 : -1]


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def of_tokens(table: NDArray[Any], output: SampleOutput) -> NDArray[Any]:
    """The entry of each of the output's tokens in the rows of a table [T, V]."""
    return table[np.arange(len(table)), output.token_ids]


@case("greedy")
async def greedy_takes_the_most_likely_token(harness: Harness) -> None:
    asked = request("a", temperature=0, tokens=12)
    async with harness.start() as engine:
        found = await collect(engine, asked)
    check_greedy(harness, found["a", 0].token_ids.tolist(), logits_of(harness, asked, found["a", 0]))


async def check_edits(harness: Harness, params: dict[str, Any], edited: Callable[[NDArray[np.float32], list[int]], None]) -> None:
    """Sample with ``params``, greedily and at temperature 1, and compare with the distribution of
    logits that ``edited`` changes in place, given the tokens of the sample before them."""
    wanted = [request("greedy", temperature=0, tokens=10, **params), request("drawn", seeds=(1, 2), tokens=10, **params)]
    async with harness.start() as engine:
        off = [replace(asked, params=SamplingParams(10, asked.params.temperature, ignore_eos=True)) for asked in wanted]
        plain = await collect(engine, *off)
        found = await collect(engine, *wanted)
    assert any(found[key].token_ids.tolist() != plain[key].token_ids.tolist() for key in found), "the parameters change nothing"
    for asked in wanted:
        for sample in range(len(asked.seeds)):
            output = found[asked.request_id, sample]
            check_shape(output, harness.capabilities)
            logits = logits_of(harness, asked, output)
            if harness.capabilities.raw_logprobs:
                np.testing.assert_allclose(model_logprobs(output), of_tokens(log_softmax(logits), output), atol=harness.tolerance)
            for at, row in enumerate(logits):
                edited(row, output.token_ids[:at].tolist())
            if asked.request_id == "greedy":
                check_greedy(harness, output.token_ids.tolist(), logits)
            elif harness.capabilities.logprobs_mode == "sampled":
                np.testing.assert_allclose(output.logprobs, of_tokens(log_softmax(logits), output), atol=harness.tolerance)


@case("greedy", "parameters.logit_bias")
async def a_bias_is_added_to_logits(harness: Harness) -> None:
    bias = {token: (-1) ** token * 4.0 for token in range(0, 128, 3)}

    def edited(row: NDArray[np.float32], _: list[int]) -> None:
        row[list(bias)] += list(bias.values())

    await check_edits(harness, {"logit_bias": tuple(bias.items())}, edited)


@case("greedy", "parameters.repetition_penalty")
async def a_repetition_penalty_divides_logits_of_prompt_and_sample(harness: Harness) -> None:
    def edited(row: NDArray[np.float32], before: list[int]) -> None:
        known = np.unique([*PROMPT, *before])
        row[known] = np.where(row[known] > 0, row[known] / 4, row[known] * 4)

    await check_edits(harness, {"repetition_penalty": 4.0}, edited)


@case("greedy", "parameters.presence_penalty", "parameters.frequency_penalty")
async def penalties_are_subtracted_per_occurrence_in_the_sample(harness: Harness) -> None:
    def edited(row: NDArray[np.float32], before: list[int]) -> None:
        for token in before:
            row[token] -= 1.5
        row[np.unique(before).astype(int)] -= 2

    likely = {"logit_bias": tuple((token, 8.0) for token in (70, 71, 72))}  # otherwise no token would occur twice

    def biased(row: NDArray[np.float32], before: list[int]) -> None:
        row[[70, 71, 72]] += 8
        edited(row, before)

    penalties = {"presence_penalty": 2.0, "frequency_penalty": 1.5}
    if "logit_bias" in harness.capabilities.parameters:
        await check_edits(harness, penalties | likely, biased)
    else:
        await check_edits(harness, penalties, edited)


@case("greedy")
async def a_stop_token_ends_a_sample_and_is_kept(harness: Harness) -> None:
    async with harness.start() as engine:
        free = (await collect(engine, request("a", temperature=0, tokens=12)))["a", 0].token_ids.tolist()
        output = (await collect(engine, request("b", temperature=0, tokens=12, stop_token_ids=(free[3],))))["b", 0]
    check_shape(output, harness.capabilities)
    assert output.token_ids.tolist() == free[: free.index(free[3]) + 1] and output.finish_reason == "stop"


@case("greedy", "parameters.min_tokens")
async def nothing_ends_a_sample_before_it_has_min_tokens(harness: Harness) -> None:
    async with harness.start() as engine:
        free = (await collect(engine, request("a", temperature=0, tokens=12)))["a", 0].token_ids.tolist()
        asked = request("b", temperature=0, tokens=12, stop_token_ids=(free[0], free[1]), min_tokens=5)
        output = (await collect(engine, asked))["b", 0]
    assert len(output.token_ids) >= 5 and not {free[0], free[1]} & set(output.token_ids[:5].tolist())
    assert (output.finish_reason == "stop") == (output.token_ids[-1] in free[:2])
    logits = logits_of(harness, asked, output)
    logits[:5, free[:2]] = -np.inf
    check_greedy(harness, output.token_ids.tolist(), logits)


@case("greedy", "parameters.top_logprobs", "top_logprobs")
async def the_most_likely_tokens_are_reported(harness: Harness) -> None:
    count = min(5, harness.capabilities.top_logprobs)
    asked = request("a", seeds=(1, 2), top_logprobs=count)
    async with harness.start() as engine:
        found = await collect(engine, asked, request("b", top_logprobs=1), request("none"))
    assert found["none", 0].top_logprobs is None
    for key, most in ((("a", 0), count), (("a", 1), count), (("b", 0), 1)):
        output = found[key]
        top, table = output.top_logprobs, log_softmax(logits_of(harness, asked, output))
        assert top is not None and top.token_ids.dtype == np.int32 and top.logprobs.dtype == np.float32
        assert top.token_ids.shape == top.logprobs.shape == (len(output.token_ids), most)
        np.testing.assert_allclose(top.logprobs, -np.sort(-table)[:, :most], atol=harness.tolerance)
        np.testing.assert_allclose(top.logprobs, np.take_along_axis(table, top.token_ids, -1), atol=harness.tolerance)


async def check_constraint(harness: Harness, kind: Any, value: str, matches: Callable[[str], bool]) -> None:
    """Sample with a constraint and check the texts. Samples that reach the limit do not count."""
    asked = replace(request("a", seeds=range(6), tokens=80, ignore_eos=False, constraint=Constraint(kind, value)), stream=True)
    async with harness.start() as engine:
        found = await collect(engine, asked, request("free", seeds=(1,)))
    for output in found.values():
        check_shape(output, harness.capabilities)
    texts = [found["a", n].text or "" for n in range(6) if found["a", n].finish_reason == "stop"]
    assert texts and all(matches(text) for text in texts), texts


@case("constraints.regex")
async def a_regex_matches_the_whole_text(harness: Harness) -> None:
    pattern = r"[a-c]{3}-\d{2}"
    await check_constraint(harness, "regex", pattern, lambda text: re.fullmatch(pattern, text) is not None)


@case("constraints.choices")
async def one_of_the_choices_is_sampled(harness: Harness) -> None:
    await check_constraint(harness, "choices", '["yes", "no \\"way\\"", "no"]', ["yes", 'no "way"', "no"].__contains__)


@case("constraints.grammar")
async def a_grammar_is_followed(harness: Harness) -> None:
    grammar = 'root ::= "(" digit ("," digit)? ")"\ndigit ::= [0-9]'
    await check_constraint(harness, "grammar", grammar, lambda text: re.fullmatch(r"\(\d(,\d)?\)", text) is not None)


@case("constraints.json_schema")
async def a_json_schema_is_followed(harness: Harness) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
    few_spaces = re.compile(r"[^ \n]*((?: ?|\n {0,16})[^ \n]+)*")  # otherwise a sample may be spaces up to its limit

    def matches(text: str) -> bool:
        return json.loads(text)["a"] in ("x", "y") and few_spaces.fullmatch(text.strip()) is not None

    await check_constraint(harness, "json_schema", json.dumps(schema), matches)


@case("constraints.json_schema")
async def an_invalid_constraint_does_not_fail_others(harness: Harness) -> None:
    async with harness.start() as engine:
        found = await collect(
            engine, request("a", seeds=(1, 2), constraint=Constraint("json_schema", '{"type": "nothing"}')), request("good")
        )
    for sample in range(2):
        error = found["a", sample].error
        assert error is not None and error.reason == "INVALID_CONSTRAINT" and found["a", sample].finish_reason == "error"
    assert found["good", 0].error is None


@case("continues")
async def a_continued_sample_equals_the_whole_one(harness: Harness) -> None:
    """The random numbers, penalties, and limits of the rest are those of one sample."""
    known: dict[str, Any] = {"frequency_penalty": 1.0} if "frequency_penalty" in harness.capabilities.parameters else {}
    async with harness.start() as engine:
        whole = (await collect(engine, request("whole", tokens=20, seeds=(9,), **known)))["whole", 0]
        ids = whole.token_ids.tolist()
        rests = [request(f"{count}", tokens=20, seeds=(9,), continued=ids[:count], **known) for count in (1, 7, 16, 19, 20)]
        found = await collect(engine, *rests)
    for asked in rests:
        output, count = found[asked.request_id, 0], len(asked.continued)
        check_shape(output, harness.capabilities)
        assert output.token_ids.tolist() == ids[count:] and output.finish_reason == whole.finish_reason
        np.testing.assert_allclose(output.logprobs, whole.logprobs[count:], atol=harness.tolerance)


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


@case("swaps_in_flight")
async def an_abort_while_paused_delivers_what_was_sampled(harness: Harness) -> None:
    async with harness.start() as engine:
        tokens = engine.stats().generated_tokens
        running = asyncio.create_task(collect(engine, request("a", tokens=100)))
        while engine.stats().generated_tokens < tokens + 3:
            await asyncio.sleep(0)
        await engine.pause()
        assert await engine.abort(["a"]) == ("a",)
        output = (await running)["a", 0]
        assert output.finish_reason == "aborted" and len(output.token_ids) >= 3
        check_shape(output, harness.capabilities)
        np.testing.assert_allclose(model_logprobs(output), harness.expected(request("a"), output, 0), atol=harness.tolerance)
        await engine.resume()
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
    """1,000 requests."""
    random_ = random.Random(0)
    async with harness.start() as engine:
        batches = [
            [request(f"{n}/{i}", seeds=tuple(range(random_.randint(1, 2))), tokens=random_.randint(1, 8)) for i in range(4)]
            for n in range(250)
        ]
        tasks = [asyncio.create_task(collect(engine, *batch)) for batch in batches]
        aborted = 0
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.001)
            aborted += len(await engine.abort([random_.choice(random_.choice(batches)).request_id for _ in range(3)]))
        for found in await asyncio.gather(*tasks):
            for output in found.values():
                check_shape(output, harness.capabilities)
        assert aborted, "no request was aborted in time"
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
                model_logprobs(output), harness.expected(asked_for(output, asked), output, version), atol=harness.tolerance
            )
    assert {span.version for span in found["b", 3 * SLOTS - 1].version_spans} == {2}


def asked_for(output: SampleOutput, asked: GroupRequest) -> GroupRequest:
    """The request of an output of the suite. All requests have the same prompt."""
    seeds = asked.seeds if output.request_id == asked.request_id else tuple(range(3 * SLOTS))
    return GroupRequest(output.request_id, asked.prompt_ids, seeds, asked.params)


@case("sessions")
async def the_next_turn_reuses_the_last_one_until_a_swap(harness: Harness) -> None:
    first = replace(request("1", prompt=range(64), tokens=24), session="s")
    async with harness.start() as engine:
        ids = (await collect(engine, first))["1", 0].token_ids.tolist()
        second = replace(request("2", prompt=[*range(64), *ids, 65, 66]), session="s")
        reused = (await collect(engine, second))["2", 0]
        await swap(engine, harness, 1)
        fresh = (await collect(engine, second))["2", 0]
    assert len(second.prompt_ids) > reused.cached_tokens >= 64 and not fresh.cached_tokens
    for output, version in ((reused, 0), (fresh, 1)):
        np.testing.assert_allclose(model_logprobs(output), harness.expected(second, output, version), atol=harness.tolerance)


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
    cut, asked = output.version_spans[0].end, request("a", tokens=100)
    before, after = (harness.expected(asked, output, version) for version in (0, 1))
    np.testing.assert_allclose(model_logprobs(output)[:cut], before[:cut], atol=harness.tolerance)
    assert np.abs(model_logprobs(output)[cut:] - before[cut:]).max() > 10 * harness.tolerance, "the new weights are not used"
    assert np.abs(before - after).max() > 10 * harness.tolerance


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


@case("swaps_in_flight")
async def offload_and_onload_may_be_repeated(harness: Harness) -> None:
    """Also in the middle of a sample, whose logprobs stay those of the weights."""
    asked = request("a", tokens=100)
    async with harness.start() as engine:
        digest, tokens = await engine.weights_digest(), engine.stats().generated_tokens
        running = asyncio.create_task(collect(engine, asked))
        while engine.stats().generated_tokens == tokens:
            await asyncio.sleep(0)
        for _ in range(2):
            await engine.offload()
        done, _ = await asyncio.wait({running}, timeout=0.2)
        assert not done
        for _ in range(2):
            await engine.onload()
        output = (await running)["a", 0]
        assert await engine.weights_digest() == digest
    check_shape(output, harness.capabilities)
    np.testing.assert_allclose(model_logprobs(output), harness.expected(asked, output, 0), atol=harness.tolerance)


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
