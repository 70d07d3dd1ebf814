"""Conversations become examples whose loss mask covers each turn of the assistant."""

from __future__ import annotations

import json
import runpy
from typing import Any

import pytest

from rollout.environment import Refusal
from rollout_testing.run import EXAMPLE
from rollout_workers.data.prompts import PromptReader, Text
from rollout_workers.data.supervised import Example, Limit, Supervised

SMOLLM2 = EXAMPLE.parent.parent / "models" / "SmolLM2-135M-Instruct"

CHAT = (
    "{% for m in messages %}({{ m.role }}){{ m.content }}<eos>;{% endfor %}{% if add_generation_prompt %}(assistant){% endif %}"
)
"""A turn ends with the end of sequence, and something follows it."""
BARE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
"""No end of sequence anywhere."""
LAST = "{% for m in messages %}({{ m.role }}){% if loop.last %}think{% endif %}{{ m.content }}<eos>{% endfor %}"
LAST += "{% if add_generation_prompt %}(assistant){% endif %}"
"""The last message is written differently."""


def talk(*contents: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if number % 2 else "user", "content": content} for number, content in enumerate(contents)]


def made(text: Text, row: Any, template: str = CHAT, *, whole: bool = False, longest: int = 200) -> Example | Refusal:
    text.tokenizer.chat_template = template
    reader = PromptReader(text, prompt_field="messages", chat_template=True)
    rows = Supervised(text, reader, answer_field="answer", train_on_prompt=whole, limit=Limit(longest))
    return rows.examples([json.dumps(row).encode()])[0]


def trained(text: Text, example: Example) -> list[str]:
    """The texts of the runs of tokens that are trained on, special tokens too."""
    runs, last = list[list[int]](), 0
    for token, on in zip(example.token_ids.tolist(), example.loss_mask.tolist(), strict=True):
        if on and not last:
            runs.append([])
        if on:
            runs[-1].append(token)
        last = on
    return [text.tokenizer.decode(run, skip_special_tokens=False) for run in runs]


@pytest.fixture
def spoken() -> Text:
    return Text(runpy.run_path(str(EXAMPLE / "prepare.py"))["build_tokenizer"]())


def test_each_turn_is_trained_on_with_its_end(spoken: Text) -> None:
    example = made(spoken, {"messages": talk("1+1=", "2", "2+3=", "5")})
    assert isinstance(example, Example)
    assert trained(spoken, example) == ["2<eos>", "5<eos>"]
    whole = spoken.tokenizer.decode(example.token_ids, skip_special_tokens=False)
    assert whole == "(user)1+1=<eos>;(assistant)2<eos>;(user)2+3=<eos>;(assistant)5<eos>"
    assert (example.prompt, example.answer) == ("(user)1+1=;(assistant)", "5")
    assert example.loss_mask[example.prompt_tokens] and not example.loss_mask[: example.prompt_tokens].any()


def test_one_turn_is_the_prompt_with_its_answer(spoken: Text) -> None:
    as_talk = made(spoken, {"messages": talk("1+1=", "2")})
    as_answer = made(spoken, {"messages": talk("1+1="), "answer": "2"})
    assert isinstance(as_talk, Example) and isinstance(as_answer, Example)
    assert as_talk.token_ids.tolist() == as_answer.token_ids.tolist()
    assert as_talk.loss_mask.tolist() == as_answer.loss_mask.tolist()
    assert (as_talk.prompt_tokens, as_talk.prompt) == (as_answer.prompt_tokens, as_answer.prompt)


def test_a_template_without_an_end_gives_its_message(spoken: Text) -> None:
    example = made(spoken, {"messages": talk("1+1=", "2", "2+3=", "5")}, BARE)
    assert isinstance(example, Example)
    assert trained(spoken, example) == ["2\n", "5\n<eos>"]


def test_a_last_turn_that_is_written_differently_is_taken_as_written(spoken: Text) -> None:
    example = made(
        spoken, {"messages": talk("1+1=", "2", "2+3=", "5")}, LAST.replace("loop.last", "loop.last and m.role == 'assistant'")
    )
    assert isinstance(example, Example)
    assert trained(spoken, example) == ["2<eos>", "think5<eos>"]


def test_the_whole_conversation_may_be_trained_on(spoken: Text) -> None:
    example = made(spoken, {"messages": talk("1+1=", "2", "2+3=", "5")}, whole=True)
    assert isinstance(example, Example) and example.loss_mask.all()


@pytest.mark.parametrize(
    ("row", "template", "longest", "reason", "message"),
    [
        ({"messages": talk("1+1=", "2", "2+3=", "5")}, LAST, 200, "PROMPT_INVALID", "writes the first 1 messages differently"),
        ({"messages": talk("1+1=", "2")}, CHAT, 8, "CONTEXT_OVERFLOW", "exceeds `engine.max_model_len` = 8"),
        ({"messages": talk("1+1=", "2", "2+3=")}, CHAT, 200, "PROMPT_INVALID", "field `answer` is not text"),
        ({"messages": []}, CHAT, 200, "PROMPT_INVALID", "refused the messages"),
        ({"messages": talk("1+1=", "2")}, "{{ raise_exception('no') }}", 200, "PROMPT_INVALID", "refused the messages: no"),
    ],
)
def test_a_conversation_that_is_refused(spoken: Text, row: Any, template: str, longest: int, reason: str, message: str) -> None:
    refused = made(spoken, row, template, longest=longest)
    assert isinstance(refused, Refusal) and refused.reason == reason and message in refused.message


@pytest.mark.skipif(not SMOLLM2.exists(), reason="models/SmolLM2-135M-Instruct is not here (examples/smollm2/prepare.py)")
def test_a_real_template() -> None:
    text = Text.load(str(SMOLLM2))
    example = made(text, {"messages": talk("hi", "hello", "who are you?", "nobody")}, text.tokenizer.chat_template)
    assert isinstance(example, Example)
    assert trained(text, example) == ["hello<|im_end|>", "nobody<|im_end|>"]
    whole = text.render(talk("hi", "hello", "who are you?", "nobody"), answering=False).rstrip("\n")
    assert example.token_ids.tolist() == text.encode([whole], special=False)[0].tolist()
