"""The client `anthropic`."""

from __future__ import annotations

from typing import Any

import anthropic
from case import KEY, MODEL, URL, characters, counted, report

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=120)
QUESTION: list[Any] = [{"role": "user", "content": "count"}]
GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": 40, "extra_body": {"temperature": 0, "return_token_ids": True}}
"""The client has no parameter `temperature`."""
SCHEMA: Any = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}


def messages() -> None:
    done: Any = client.messages.create(messages=QUESTION, **GREEDY)
    counted(done.token_ids, done.weight_versions)
    assert characters(done.content[0].text) == done.token_ids
    assert done.stop_reason == "max_tokens" and done.usage.output_tokens == 40


def streamed() -> None:
    with client.messages.stream(messages=QUESTION, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_message().usage.output_tokens == len(text) == 40


def turns() -> None:
    agent = anthropic.Anthropic(base_url=f"{URL}/sessions/anthropic-turns", api_key=KEY, max_retries=0, timeout=120)
    said = list(QUESTION)
    for turn in range(4):
        done = agent.messages.create(messages=said, system="You count.", **GREEDY)
        said += [{"role": "assistant", "content": done.content}, {"role": "user", "content": f"turn {turn}"}]


def tools() -> None:
    done = client.messages.create(
        messages=QUESTION,
        tools=[{"name": "switch", "input_schema": SCHEMA}],
        tool_choice={"type": "tool", "name": "switch"},
        **{**GREEDY, "max_tokens": 400},
    )
    call = done.content[-1]
    assert call.type == "tool_use" and call.name == "switch" and isinstance(call.input["on"], bool), done
    result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "done"}]}
    history: Any = [*QUESTION, {"role": "assistant", "content": done.content}, result]
    assert client.messages.create(messages=history, tools=[{"name": "switch", "input_schema": SCHEMA}], **GREEDY).content


def count_tokens() -> None:
    done = client.messages.create(messages=QUESTION, **GREEDY)
    counted_ = client.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens
    assert counted_ == done.usage.input_tokens + (done.usage.cache_read_input_tokens or 0)


def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]


def errors() -> None:
    try:
        client.messages.create(**{**GREEDY, "model": "another"}, messages=QUESTION)
    except anthropic.NotFoundError:
        return
    raise AssertionError("no NotFoundError")


report("anthropic (Python)", anthropic.__version__, [messages, streamed, turns, tools, count_tokens, models, errors])
