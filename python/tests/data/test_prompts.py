"""Rows become prompts and examples; broken rows become typed refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rollout.environment import Refusal
from rollout_workers.data.prompts import Prompt, PromptInvalid, PromptReader, Text
from rollout_workers.data.supervised import Example, Limit, Supervised


def reader(text: Text, *, chat: bool = False) -> PromptReader:
    return PromptReader(text, prompt_field="prompt", chat_template=chat)


def row(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def test_a_string_is_tokenised_as_it_is(text: Text) -> None:
    [prompt] = reader(text).read([row(prompt="17+25=")])
    assert isinstance(prompt, Prompt)
    assert prompt.token_ids.dtype == np.int32
    assert text.decode([prompt.token_ids]) == ["17+25="] == [prompt.text]


def test_a_warm_text_has_rendered_a_chat_before_the_first_one_comes(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[object] = []
    monkeypatch.setattr(text.tokenizer, "apply_chat_template", lambda messages, **_: rendered.append(messages) or "hello")
    text.tokenizer.chat_template = "{{ messages }}"
    text.warm()
    assert len(rendered) == 1
    text.tokenizer.chat_template = None
    text.warm()  # plain text alone
    assert len(rendered) == 1


def test_a_template_that_refuses_the_warm_up_refuses_nothing_else(text: Text) -> None:
    text.tokenizer.chat_template = "{{ raise_exception('two messages or none') }}"
    text.warm()


def test_messages_and_chats_go_through_the_template(text: Text) -> None:
    text.tokenizer.chat_template = "{% for m in messages %}<eos>{{ m['role'][0] }}:{{ m['content'] }}{% endfor %}"
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1="}]
    rows = [row(prompt="1+1="), row(prompt=messages)]
    one, two = reader(text, chat=True).read(rows)
    assert isinstance(one, Prompt) and isinstance(two, Prompt)
    assert one.text == "u:1+1="
    assert two.text == "s:addu:1+1="
    assert one.token_ids[0] == text.eos_id


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"{", "is not JSON"),
        (b"[1]", "not a JSON object"),
        (b"{}", "field `prompt` is neither text nor a list"),
        (b'{"prompt": 3}', "field `prompt` is neither text nor a list"),
        (b'{"prompt": ""}', "has no tokens"),
    ],
)
def test_a_broken_row_gives_its_error_and_leaves_the_others(text: Text, line: bytes, what: str) -> None:
    bad, good = reader(text).read([line, row(prompt="1+1=")])
    assert isinstance(bad, PromptInvalid) and what in str(bad)
    assert isinstance(good, Prompt)


def test_a_template_that_refuses_is_a_typed_error(text: Text) -> None:
    text.tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    [bad] = reader(text, chat=True).read([row(prompt="a")])
    assert isinstance(bad, PromptInvalid) and "no system role" in str(bad)


def test_a_prompt_is_tokenised_once(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = reader(text)
    first = rows.read([row(prompt="1+1="), row(prompt="2+2=")])
    monkeypatch.setattr(text, "encode", None)
    assert rows.read([row(prompt="2+2="), row(prompt="1+1=")]) == first[::-1]


def supervised(text: Text, *, train_on_prompt: bool = False, longest: int = 16, truncate: bool = False) -> Supervised:
    limit = Limit(longest, truncate=truncate)
    return Supervised(text, reader(text), answer_field="answer", train_on_prompt=train_on_prompt, limit=limit)


def test_an_example_is_trained_on_from_its_answer_to_the_end(text: Text) -> None:
    [example] = supervised(text).examples([row(prompt="17+25=", answer="42")])
    assert isinstance(example, Example)
    assert example.token_ids.tolist() == [*text.encode(["17+25=42"])[0], text.eos_id]
    assert example.loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1]
    assert (example.prompt_tokens, example.prompt, example.answer) == (6, "17+25=", "42")


def test_the_prompt_may_be_trained_on_too(text: Text) -> None:
    [example] = supervised(text, train_on_prompt=True).examples([row(prompt="1=", answer="1")])
    assert isinstance(example, Example)
    assert example.loss_mask.tolist() == [1, 1, 1, 1]


def test_a_row_is_refused_rather_than_cut(text: Text) -> None:
    fits, long, odd = supervised(text, longest=9).examples(
        [row(prompt="17+25=", answer="42"), row(prompt="17+25=", answer="042"), row(prompt="1", answer=2)]
    )
    assert isinstance(fits, Example)
    assert isinstance(long, Refusal) and long.reason == "CONTEXT_OVERFLOW"
    assert isinstance(odd, Refusal) and odd.reason == "PROMPT_INVALID"


def test_a_tokenizer_without_an_end_is_refused(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(text), "eos_id", None)
    with pytest.raises(PromptInvalid, match="end-of-sequence"):
        supervised(text)


def test_a_truncated_answer_loses_its_end_and_the_end_of_sequence(text: Text) -> None:
    cut, hopeless = supervised(text, longest=7, truncate=True).examples(
        [row(prompt="17+25=", answer="42"), row(prompt="117+25=", answer="142")]
    )
    [whole] = supervised(text).examples([row(prompt="17+25=", answer="42")])
    assert isinstance(cut, Example) and isinstance(whole, Example)
    assert cut.token_ids.tolist() == whole.token_ids[:7].tolist() and cut.loss_mask.tolist() == [0] * 6 + [1]
    assert isinstance(hopeless, Refusal) and "leaves no token to train on" in hopeless.message


def test_a_long_text_keeps_its_end(text: Text) -> None:
    [prompt] = PromptReader(text, prompt_field="prompt", chat_template=False, longest=4).read([row(prompt="117+25=")])
    assert isinstance(prompt, Prompt) and prompt.text == "+25=" and len(prompt.token_ids) == 4


def test_a_long_chat_loses_its_oldest_turns_first(text: Text) -> None:
    text.tokenizer.chat_template = "{% for m in messages %}<eos>{{ m['role'][0] }}:{{ m['content'] }}{% endfor %}"
    roles = ("system", "user", "assistant", "user")
    chat = [{"role": role, "content": content} for role, content in zip(roles, ("add", "1+1=", "2", "17+25="), strict=True)]

    def at(longest: int) -> Prompt | PromptInvalid:
        [prompt] = PromptReader(text, prompt_field="prompt", chat_template=True, longest=longest).read([row(prompt=chat)])
        return prompt

    for longest, want in ((99, "s:addu:1+1=a:2u:17+25="), (15, "s:addu:17+25="), (13, "s:addu:5=")):
        prompt = at(longest)
        assert isinstance(prompt, Prompt) and len(prompt.token_ids) <= longest
        assert prompt.text.startswith("s:add") and want.endswith(prompt.text[-2:]), prompt
    assert isinstance(at(9), PromptInvalid)
