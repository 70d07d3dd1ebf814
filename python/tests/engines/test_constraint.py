"""Structured output: completions that match, errors, and how a complete text ends."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from rollout_workers.engines.base import Constraint
from rollout_workers.engines.errors import ConstraintsUnavailable, InvalidConstraint, TokenizerMissing
from rollout_workers.engines.transformers.constraint import grammar_of

from .tiny import END, outputs, request, running, same_bits

DIGITS = Constraint("regex", r"[0-7]{4}x")


def asked(name: str, constraint: Constraint, **params):
    return replace(request(name, constraint=constraint, **({"max_tokens": 30, "ignore_eos": False} | params)), stream=True)


@pytest.mark.parametrize(("ignore_eos", "length"), [(False, 6), (True, 5)])
async def test_a_complete_text_ends_with_the_end_token_if_the_model_has_one(ignore_eos: bool, length: int) -> None:
    async with running(text=True) as engine:
        output = (await outputs(engine, asked("a", DIGITS, ignore_eos=ignore_eos)))["a", 0]
    assert output.finish_reason == "stop" and len(output.token_ids) == length
    assert (output.token_ids[-1] == END) == (not ignore_eos)
    assert output.text is not None and len(output.text) == 5 and output.text.endswith("x")
    assert not ignore_eos or output.logprobs[-1] == 0  # the only token that was allowed


@pytest.mark.parametrize("length", [5, 6])
async def test_a_complete_text_at_the_limit_has_stopped(length: int) -> None:
    async with running(text=True) as engine:
        output = (await outputs(engine, asked("a", DIGITS, max_tokens=length)))["a", 0]
    assert output.finish_reason == "stop" and len(output.token_ids) == length


async def test_a_complete_text_ends_before_min_tokens() -> None:
    async with running(text=True) as engine:
        output = (await outputs(engine, asked("a", DIGITS, min_tokens=20)))["a", 0]
    assert output.finish_reason == "stop" and len(output.token_ids) == 6


async def test_other_samples_keep_their_bits_and_a_continued_sample_its_constraint() -> None:
    async with running(text=True, deterministic=True) as engine:
        alone = await outputs(engine, request("b", seeds=(1, 2)))
        found = await outputs(engine, asked("a", DIGITS, seeds=(3,)), request("b", seeds=(1, 2)))
        whole = found["a", 0]
        rest = (await outputs(engine, replace(asked("a", DIGITS, seeds=(3,)), continued=whole.token_ids[:2])))["a", 0]
        done = (await outputs(engine, replace(asked("a", DIGITS), continued=whole.token_ids[:-1])))["a", 0]
        wrong = (await outputs(engine, replace(asked("a", DIGITS), continued=(END - 1, END - 1))))["a", 0]
    assert all(same_bits(alone[key], found[key]) for key in alone)
    assert rest.token_ids.tolist() == whole.token_ids[2:].tolist() and rest.text == (whole.text or "")[2:]
    assert done.finish_reason == "stop" and done.token_ids.tolist() == [END]
    assert isinstance(wrong.error, InvalidConstraint) and "continue" in str(wrong.error)


async def test_logprobs_are_of_the_allowed_tokens() -> None:
    async with running(text=True) as engine:
        output = (await outputs(engine, asked("a", Constraint("choices", json.dumps(["A", "B"])))))["a", 0]
    assert output.raw_logprobs is not None and output.raw_logprobs[0] < output.logprobs[0] < 0
    assert np.isfinite(output.raw_logprobs).all()


@pytest.mark.parametrize(
    ("constraint", "names"),
    [
        (Constraint("json_schema", "{"), "JSON schema"),
        (Constraint("json_schema", "3"), "must be an object"),
        (Constraint("json_schema", '{"type": "nothing"}'), "nothing"),
        (Constraint("regex", "(a"), "unclosed group"),
        (Constraint("grammar", "root ::= ("), "GBNF"),
        (Constraint("grammar", "start: nothing"), "nothing"),
        (Constraint("choices", "[]"), "JSON list"),
    ],
)
async def test_an_invalid_constraint_is_named(constraint: Constraint, names: str) -> None:
    async with running(text=True) as engine:
        found = await outputs(engine, asked("a", constraint, seeds=(1, 2)), request("good"))
    assert all(isinstance(found["a", n].error, InvalidConstraint) and names in str(found["a", n].error) for n in range(2))
    assert found["good", 0].error is None


async def test_without_the_library_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    async with running(text=True) as engine:
        output = (await outputs(engine, asked("a", DIGITS)))["a", 0]
    assert isinstance(output.error, ConstraintsUnavailable) and "pip install llguidance" in str(output.error)


async def test_a_constraint_needs_a_tokenizer() -> None:
    async with running() as engine:
        with pytest.raises(TokenizerMissing, match="constraint"):
            await outputs(engine, request("a", constraint=DIGITS))


def test_json_has_little_whitespace() -> None:
    assert "whitespace_pattern" in grammar_of(Constraint("json_object"))
