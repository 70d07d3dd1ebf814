"""Use a gateway as agents do, with the unmodified clients of OpenAI and Anthropic: tools, streams,
responses. Arguments: URL without a path, API key. Prints a JSON object."""

import json
import sys

import anthropic
import openai
from pydantic import BaseModel

PARAMETERS = {"type": "object", "properties": {"q": {"type": "integer"}}, "required": ["q"]}


class Answer(BaseModel):
    q: int


def chats(client: openai.OpenAI) -> dict[str, object]:
    tools = [{"type": "function", "function": {"name": "search", "parameters": PARAMETERS, "strict": True}}]
    messages: list[object] = [{"role": "user", "content": "hi"}]
    first = client.chat.completions.create(model="tiny", messages=messages, tools=tools, extra_body={"return_token_ids": True})
    said = first.choices[0].message
    messages += [said, {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "no page"}]
    second = client.chat.completions.create(model="tiny", messages=messages, tools=tools)
    with client.chat.completions.stream(model="tiny", messages=messages[:1], tools=tools) as stream:
        streamed = stream.get_final_completion().choices[0]
    scored = client.chat.completions.create(model="tiny", messages=messages[:1], logprobs=True, top_logprobs=2, max_tokens=1)
    top = scored.choices[0].logprobs.content[0].top_logprobs
    return {
        "call": [said.tool_calls[0].function.name, said.tool_calls[0].function.arguments, first.choices[0].finish_reason],
        "thought": said.reasoning_content,
        "ids": [first.prompt_token_ids, first.choices[0].token_ids],
        "after the tool": second.choices[0].message.content,
        "streamed call": [streamed.message.tool_calls[0].function.arguments, streamed.finish_reason],
        "top": [[t.token, t.bytes] for t in top],
    }


def responses(client: openai.OpenAI) -> dict[str, object]:
    tools = [{"type": "function", "name": "search", "parameters": PARAMETERS, "strict": True}]
    first = client.responses.create(model="tiny", input="hi", tools=tools)
    call = next(item for item in first.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "no page"}
    second = client.responses.create(model="tiny", input=[result], previous_response_id=first.id, tools=tools)
    whole = client.responses.create(model="tiny", input=[{"role": "user", "content": "hi"}, *first.output, result], tools=tools)
    with client.responses.stream(model="tiny", input="hi", tools=tools) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_response()
    parsed = client.responses.create(
        model="tiny", input="hi", text={"format": {"type": "json_schema", "name": "a", "schema": Answer.model_json_schema()}}
    )
    stored = client.responses.retrieve(second.id)
    client.responses.delete(second.id)
    return {
        "output": [item.type for item in first.output],
        "call": [call.name, call.arguments],
        "continued": second.output_text,
        "whole": whole.output_text,
        "events": sorted(set(events)),
        "streamed call": streamed.output[1].arguments,
        "parsed": parsed.output_text,
        "stored": stored.output_text,
        "usage": [first.usage.input_tokens, first.usage.output_tokens, first.usage.output_tokens_details.reasoning_tokens],
    }


def messages(client: anthropic.Anthropic) -> dict[str, object]:
    tools = [{"name": "search", "input_schema": PARAMETERS}]
    ask = {"role": "user", "content": "hi"}
    first = client.messages.create(model="tiny", max_tokens=9, messages=[ask], tools=tools)
    call = first.content[-1]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "no page"}]}
    history = [ask, {"role": "assistant", "content": first.content}, result]
    second = client.messages.create(model="tiny", max_tokens=9, messages=history, tools=tools)
    with client.messages.stream(model="tiny", max_tokens=9, messages=[ask], tools=tools) as stream:
        streamed = stream.get_final_message()
    with client.messages.stream(model="tiny", max_tokens=9, messages=[ask]) as stream:
        text = "".join(stream.text_stream)
    counted = client.messages.count_tokens(model="tiny", messages=[ask])
    errors = {}
    for name, attempt in {
        "unknown model": lambda: client.messages.create(model="x", max_tokens=9, messages=[ask]),
        "context overflow": lambda: client.messages.create(model="tiny", max_tokens=1000, messages=[ask]),
        "wrong key": lambda: client.with_options(api_key="wrong").messages.create(model="tiny", max_tokens=9, messages=[ask]),
    }.items():
        try:
            attempt()
        except anthropic.APIStatusError as e:
            errors[name] = f"{type(e).__name__} {e.body['error']['type']} {e.body['error']['reason']}"
    return {
        "blocks": [block.type for block in first.content],
        "call": [call.name, call.input, first.stop_reason],
        "after the tool": second.content[0].text,
        "streamed call": [streamed.content[-1].input, streamed.stop_reason, streamed.usage.input_tokens],
        "text": text,
        "counted": counted.input_tokens,
        "models": [model.id for model in client.models.list()],
        "errors": errors,
    }


def main() -> None:
    url, key = sys.argv[1:]
    oa = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    an = anthropic.Anthropic(base_url=f"{url}/sessions/an-agent", api_key=key, max_retries=0)
    bearer = anthropic.Anthropic(base_url=url, auth_token=key, max_retries=0)
    greeting = bearer.messages.create(model="tiny", max_tokens=9, messages=[{"role": "user", "content": "hi"}])
    found = {"chats": chats(oa), "responses": responses(oa), "messages": messages(an), "bearer": greeting.content[0].text}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
