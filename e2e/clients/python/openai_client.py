"""The client `openai`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
from case import KEY, MODEL, URL, characters, counted, report
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=120)
QUESTION: list[Any] = [{"role": "user", "content": "count"}]
TOOL: Any = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 40}
IDS: dict[str, Any] = {"extra_body": {"return_token_ids": True}}


def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


def chat() -> None:
    done: Any = client.chat.completions.create(messages=QUESTION, n=2, logprobs=True, top_logprobs=3, **GREEDY, **IDS)
    for choice in done.choices:
        counted(choice.token_ids, choice.weight_versions)
        assert characters(choice.message.content) == choice.token_ids and choice.finish_reason == "length"
        assert len(choice.logprobs.content) == 40 and len(choice.logprobs.content[0].top_logprobs) == 3
    assert done.usage.completion_tokens == 80


def streamed_chat() -> None:
    text, last, usage = "", None, None
    for piece in client.chat.completions.create(
        messages=QUESTION, stream=True, stream_options={"include_usage": True}, **GREEDY, **IDS
    ):
        usage = piece.usage or usage
        for choice in piece.choices:
            text += choice.delta.content or ""
            last = choice if choice.finish_reason else last
    assert last is not None and usage is not None and usage.completion_tokens == 40
    counted(characters(text), last.model_dump()["weight_versions"])


def asynchronous() -> None:
    """32 requests at once."""

    async def ask(many: openai.AsyncOpenAI, number: int) -> None:
        done: Any = await many.chat.completions.create(messages=[{"role": "user", "content": f"count {number}"}], **GREEDY, **IDS)
        counted(done.choices[0].token_ids, done.choices[0].weight_versions)

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=120) as many:
            await asyncio.gather(*(ask(many, number) for number in range(32)))

    asyncio.run(main())


def turns() -> None:
    """A session in which each turn continues the last."""
    messages = list(QUESTION)
    for turn in range(4):
        done: Any = client.chat.completions.create(messages=messages, **GREEDY, **IDS)
        counted(done.choices[0].token_ids, done.choices[0].weight_versions)
        messages += [done.choices[0].message, {"role": "user", "content": f"turn {turn}"}]


def tools() -> None:
    """A required call of a tool, and its result."""
    tool: Any = {"type": "function", "function": {"name": "switch", "description": "a lamp", "parameters": TOOL, "strict": True}}
    done = client.chat.completions.create(
        messages=QUESTION, tools=[tool], tool_choice="required", **{**GREEDY, "max_tokens": 400}
    )
    calls = done.choices[0].message.tool_calls
    assert calls and calls[0].type == "function" and calls[0].function.name == "switch", done
    assert calls[0].function.arguments in ('{"on": true}', '{"on": false}', '{"on":true}', '{"on":false}'), calls
    result: Any = {"role": "tool", "tool_call_id": calls[0].id, "content": "done"}
    messages: list[Any] = [*QUESTION, done.choices[0].message, result]
    assert (
        client.chat.completions.create(messages=messages, tools=[tool], tool_choice="none", **GREEDY).choices[0].message.content
    )


class Lamp(BaseModel):
    on: bool


def parsed() -> None:
    """`response_format` with a schema."""
    done = client.chat.completions.parse(messages=QUESTION, response_format=Lamp, temperature=0, max_tokens=400, model=MODEL)
    assert isinstance(done.choices[0].message.parsed, Lamp)


def completions() -> None:
    done: Any = client.completions.create(prompt=["ab", "cd"], logprobs=2, stop="z", seed=3, **GREEDY, **IDS)
    for choice in done.choices:
        counted(choice.token_ids, choice.weight_versions)
    streamed = client.completions.create(prompt=[5, 6, 7], stream=True, **GREEDY)
    assert "".join(piece.choices[0].text for piece in streamed if piece.choices)


def echo() -> None:
    scored = client.completions.create(model=MODEL, prompt="abcdef", echo=True, logprobs=1, max_tokens=0)
    logprobs = scored.choices[0].logprobs
    assert scored.choices[0].text == "abcdef" and logprobs is not None and logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == 6 and logprobs.token_logprobs[0] is None


def responses() -> None:
    first = client.responses.create(model=MODEL, input="count", temperature=0, max_output_tokens=40)
    second = client.responses.create(model=MODEL, input="more", previous_response_id=first.id, max_output_tokens=40)
    assert client.responses.retrieve(second.id).output_text == second.output_text
    assert client.responses.input_items.list(second.id).data
    client.responses.delete(second.id)
    with client.responses.stream(model=MODEL, input="count", temperature=0, max_output_tokens=40) as stream:
        events = [event.type for event in stream]
    assert events[0] == "response.created" and events[-1] in ("response.completed", "response.incomplete"), events


def errors() -> None:
    """Errors have the classes of the client."""
    wrong: list[tuple[type[Exception], Callable[[], object]]] = [
        (openai.NotFoundError, lambda: client.completions.create(model="another", prompt="a")),
        (openai.BadRequestError, lambda: client.completions.create(model=MODEL, prompt="a", temperature=-1)),
        (openai.BadRequestError, lambda: client.completions.create(model=MODEL, prompt="a", max_tokens=100_000)),
    ]
    for kind, call in wrong:
        try:
            call()
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}")


def disconnects() -> None:
    """A client that closes its stream early disturbs no other request."""
    with client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True, max_tokens=1000) as stream:
        next(iter(stream))
    chat()


cases = [models, chat, streamed_chat, asynchronous, turns, tools, parsed, completions, echo, responses, errors, disconnects]
report("openai (Python)", openai.__version__, cases)
