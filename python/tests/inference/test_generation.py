"""Every field of a request reaches the engine, or is refused with its name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from rollout.inference.v1 import inference_pb2 as pb
from rollout_testing.engine import ScriptedEngine
from rollout_testing.templates import text_of
from rollout_workers.data.prompts import Text
from rollout_workers.engines.base import Constraint, GroupRequest, SampleDelta, SampleOutput, SamplingParams, TopLogprobs
from rollout_workers.engines.registry import Capabilities
from rollout_workers.inference.generation import Generation, WeightsNotFound
from rollout_workers.inference.model import Model
from rollout_workers.inference.params import UnsupportedByEngine
from rollout_workers.inference.prompts import InvalidPrompt, Prompts
from rollout_workers.worker.status import InvalidRequest, status_of

LIMIT = 512
ALL = Capabilities(
    top_logprobs=20,
    prompt_logprobs=True,
    constraints=("json_schema", "json_object", "regex", "grammar", "choices"),
    parameters=("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens"),
    continues=True,
)
EVERYTHING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 3,
    "min_p": 0.125,
    "max_tokens": 7,
    "stop": ["end"],
    "seed": 9,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {3: 1.5, 2: -100},
    "min_tokens": 2,
    "stop_token_ids": [4],
    "ignore_eos": True,
    "top_logprobs": 2,
    "constraint": pb.Constraint(regex="[0-9]+"),
}


@cache
def text() -> Text:
    return text_of("hermes")


class Answering(ScriptedEngine):
    """Answers with a text, streamed by token, with two alternatives at each."""

    def __init__(self, answer: str = "It is 4.") -> None:
        self.ids = text().encode([answer], special=False)[0]
        super().__init__(lambda request, sample: self.ids[len(request.continued) :].tolist())

    async def generate(self, batch: Sequence[GroupRequest]) -> AsyncIterator[SampleDelta | SampleOutput]:
        async for item in super().generate(batch):
            assert isinstance(item, SampleOutput)
            top = TopLogprobs(
                np.stack([item.token_ids, item.token_ids + 1], 1), np.full((len(item.token_ids), 2), -0.5, np.float32)
            )
            words = text().decode([[i] for i in item.token_ids])
            for at, word in enumerate(words):
                one = slice(at, at + 1)
                yield SampleDelta(
                    item.request_id,
                    item.sample,
                    at,
                    item.token_ids[one],
                    item.logprobs[one],
                    None,
                    word,
                    self.version,
                    TopLogprobs(top.token_ids[one], top.logprobs[one]),
                )
            yield replace(item, text="".join(words), top_logprobs=top, stop_string="end", cached_tokens=3)


def generation(engine: ScriptedEngine | None = None, capabilities: Capabilities = ALL) -> Generation:
    model = Model(engine or Answering(), text(), kind="scripted", capabilities=capabilities)
    return Generation(model, SamplingParams(max_tokens=64), LIMIT)


def asked(prompt: str = "What is 2+2?", n: int = 1, params: dict[str, Any] | None = None, **fields: Any) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(**(params or {}))
    return pb.GenerateRequest(request_id="r", prompts=[pb.Prompt(text=prompt)], n=n, params=sampling, **fields)


async def answers(made: Generation, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [piece async for piece in made.generate(request)]


async def test_every_parameter_reaches_the_engine() -> None:
    engine = Answering()
    await answers(generation(engine), asked(params=EVERYTHING))
    [request] = engine.requests
    assert request.params == SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        stop=("end",),
        stop_token_ids=(4,),
        ignore_eos=True,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias=((2, -100.0), (3, 1.5)),
        min_tokens=2,
        top_logprobs=2,
        constraint=Constraint("regex", "[0-9]+"),
    )


@pytest.mark.parametrize(
    ("given", "constraint"),
    [
        (pb.Constraint(json_schema='{"type": "object"}'), Constraint("json_schema", '{"type": "object"}')),
        (pb.Constraint(json_object=True), Constraint("json_object")),
        (pb.Constraint(grammar='root ::= "a"'), Constraint("grammar", 'root ::= "a"')),
        (pb.Constraint(choices=pb.Choices(texts=["a", "b"])), Constraint("choices", '["a", "b"]')),
    ],
)
async def test_every_constraint_reaches_the_engine(given: pb.Constraint, constraint: Constraint) -> None:
    engine = Answering()
    await answers(generation(engine), asked(params={"constraint": given}))
    assert engine.requests[0].params.constraint == constraint


@pytest.mark.parametrize(
    ("path", "params", "fields"),
    [
        ("params.repetition_penalty", {"repetition_penalty": 1.5}, {}),
        ("params.presence_penalty", {"presence_penalty": 0.5}, {}),
        ("params.frequency_penalty", {"frequency_penalty": 0.5}, {}),
        ("params.logit_bias", {"logit_bias": {1: 1}}, {}),
        ("params.min_tokens", {"min_tokens": 1}, {}),
        ("params.temperature", {"temperature": 0}, {}),
        ("params.top_logprobs", {"top_logprobs": 1}, {}),
        ("params.constraint.regex", {"constraint": pb.Constraint(regex="a")}, {}),
        ("prompt_logprobs", {}, {"prompt_logprobs": True}),
        ("continuations", {"seed": 1}, {"continuations": [pb.Continuation(token_ids=[5])]}),
    ],
)
async def test_what_the_engine_does_not_support_is_refused_by_name(
    path: str, params: dict[str, Any], fields: dict[str, Any]
) -> None:
    engine = Answering()
    with pytest.raises(UnsupportedByEngine, match="engine scripted does not support") as caught:
        await answers(generation(engine, Capabilities(greedy=False)), asked(params=params, **fields))
    assert [where for where, _ in caught.value.violations] == [path] and path in str(caught.value)
    assert caught.value.metadata == {"engine": "scripted", "parameter": path} and not engine.requests
    assert status_of(caught.value).code == 3, "INVALID_ARGUMENT"


async def test_all_unsupported_parameters_are_listed_at_once() -> None:
    with pytest.raises(UnsupportedByEngine) as caught:
        await answers(generation(capabilities=Capabilities()), asked(params=EVERYTHING))
    assert len(caught.value.violations) == 7


async def test_values_that_switch_a_parameter_off_need_no_support() -> None:
    off = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "min_tokens": 0, "top_logprobs": 0}
    assert await answers(generation(capabilities=Capabilities()), asked(params=off))


@pytest.mark.parametrize(
    ("path", "params"),
    [
        ("params.min_tokens", {"min_tokens": 9, "max_tokens": 8}),
        ("params.logit_bias", {"logit_bias": {9999: 1}}),
        ("params.stop", {"stop": [""]}),
        ("params.constraint.json_schema", {"constraint": pb.Constraint(json_schema="{")}),
    ],
)
async def test_invalid_parameters_are_refused_by_name(path: str, params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await answers(generation(), asked(params=params))
    assert [where for where, _ in caught.value.violations] == [path] and path in str(caught.value)


async def test_no_tokens_are_sampled_for_max_tokens_0() -> None:
    engine = Answering()
    request = asked(params={"max_tokens": 0}, n=2, prompt_logprobs=True, stream=True)
    pieces = await answers(generation(engine), request)
    assert [piece.finish_reason for piece in pieces] == ["length", "length"] and not engine.requests
    for piece in pieces:
        assert not piece.token_ids and len(piece.prompt_logprobs) == piece.prompt_tokens == len(piece.prompt_token_ids)
    filled = asked("a" * LIMIT, params={"max_tokens": 0}, prompt_logprobs=True)
    assert len(await answers(generation(engine), filled)) == 1, "the prompt may fill the context"


async def test_pieces_have_bytes_alternatives_and_the_stop_string() -> None:
    for stream in (False, True):
        pieces = await answers(generation(), asked(token_bytes=True, stream=stream, params={"top_logprobs": 2}))
        tokens = [data for piece in pieces for data in piece.token_bytes]
        ids = [i for piece in pieces for i in piece.token_ids]
        top = [each for piece in pieces for each in piece.top_logprobs]
        assert b"".join(tokens) == b"It is 4." and len(tokens) == len(ids) == len(top)
        for token, best in zip(ids, top, strict=True):
            assert list(best.token_ids) == [token, token + 1] and list(best.logprobs) == [-0.5, -0.5]
            assert list(best.token_bytes) == text().token_bytes(np.array([token, token + 1]))
        assert (pieces[-1].stop_string, pieces[-1].cached_tokens) == ("end", 3)
    [silent] = await answers(generation(), asked())
    assert not silent.token_bytes and not silent.top_logprobs[0].token_bytes


async def test_alternatives_of_the_prompt_are_returned() -> None:
    request = asked(prompt_logprobs=True, prompt_top_logprobs=2, token_bytes=True)
    [piece] = await answers(generation(), request)
    assert len(piece.prompt_top_logprobs) == piece.prompt_tokens
    assert not piece.prompt_top_logprobs[0].token_ids, "the first token has none"
    assert all(len(top.token_ids) == len(top.token_bytes) == 2 for top in piece.prompt_top_logprobs[1:])


async def test_a_pinned_version_must_be_current() -> None:
    engine = Answering()
    engine.version = 3
    assert await answers(generation(engine), asked(weights_version=3))
    with pytest.raises(WeightsNotFound, match="serves version 3") as caught:
        await answers(generation(engine), asked(weights_version=2))
    assert caught.value.metadata["current"] == "3" and status_of(caught.value).code == 9, "FAILED_PRECONDITION"


async def test_continued_completions_keep_their_seed_and_budget() -> None:
    engine = Answering()
    whole = (await answers(generation(engine), asked(n=3, params={"seed": 7})))[1]
    [group] = engine.requests
    engine = Answering()
    request = asked(n=3, params={"seed": 7}, continuations=[pb.Continuation(sample=1, token_ids=whole.token_ids[:2])])
    pieces = {piece.sample: piece for piece in await answers(generation(engine), request)}
    continued, fresh = engine.requests
    assert (fresh.seeds, continued.seeds) == ((group.seeds[0], group.seeds[2]), (group.seeds[1],))
    assert list(continued.continued) == list(whole.token_ids[:2]) and not len(fresh.continued)
    assert list(pieces[1].token_ids) == list(whole.token_ids[2:]), "only what is new is returned"
    assert sorted(pieces) == [0, 1, 2] and continued.params == fresh.params


async def test_completions_that_have_ended_are_not_sampled_again() -> None:
    engine = Answering()
    request = asked(n=2, params={"seed": 7}, continuations=[pb.Continuation(sample=1, token_ids=[5, 6], ended=True)])
    pieces = await answers(generation(engine), request)
    assert {piece.sample for piece in pieces} == {0} and len(engine.requests) == 1


async def test_a_continuation_whose_budget_is_used_up_ends() -> None:
    engine = Answering()
    request = asked(params={"seed": 7, "max_tokens": 2}, continuations=[pb.Continuation(token_ids=[5, 6])])
    [piece] = await answers(generation(engine), request)
    assert piece.finish_reason == "length" and not piece.token_ids and not engine.requests


@pytest.mark.parametrize(
    ("path", "given", "seed"),
    [
        ("params.seed", [pb.Continuation(token_ids=[5])], None),
        ("continuations[0].prompt", [pb.Continuation(prompt=1, token_ids=[5])], 1),
        ("continuations[0].sample", [pb.Continuation(sample=2, token_ids=[5])], 1),
        ("continuations[1]", [pb.Continuation(token_ids=[5]), pb.Continuation(token_ids=[5])], 1),
        ("continuations[0].token_ids", [pb.Continuation(token_ids=[2**32 - 1])], 1),
    ],
)
async def test_invalid_continuations_are_refused_by_name(path: str, given: list[pb.Continuation], seed: int | None) -> None:
    params = {} if seed is None else {"seed": seed}
    with pytest.raises(InvalidRequest) as caught:
        await answers(generation(), asked(n=2, params=params, continuations=given))
    assert [where for where, _ in caught.value.violations] == [path]


async def test_the_session_is_named_to_the_engine() -> None:
    engine = Answering()
    await answers(generation(engine), asked())
    assert engine.requests[0].session == ""


def test_ids_become_text_with_special_tokens() -> None:
    ids = text().encode(["<|im_start|>user\nWhat?<|im_end|>"], special=False)[0]
    made = generation()
    assert made.detokenized([pb.TokenIds(ids=ids.tolist())] * 2) == ["<|im_start|>user\nWhat?<|im_end|>"] * 2
    with pytest.raises(InvalidPrompt, match="9999"):
        made.detokenized([pb.TokenIds(ids=[5, 9999])])


async def test_a_text_may_have_no_special_tokens() -> None:
    tokenizer: Any = deepcopy(text().tokenizer)
    begin = int(tokenizer.convert_tokens_to_ids("<|im_start|>"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", begin)])
    sent = [pb.Prompt(text="a", no_special_tokens=True), pb.Prompt(text="a"), pb.Prompt(text="b", no_special_tokens=True)]
    plain, whole, other = (asked.ids.tolist() for asked in await Prompts(Text(tokenizer), 64).read(sent))
    assert whole == [begin, *plain] and begin not in plain + other and plain != other
