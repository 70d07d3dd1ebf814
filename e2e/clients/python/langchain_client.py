"""The client `langchain-openai`."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from case import KEY, MODEL, URL, characters, report
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

settings: dict[str, Any] = {"base_url": f"{URL}/v1", "api_key": KEY, "model": MODEL, "temperature": 0, "max_retries": 0}
model = ChatOpenAI(max_completion_tokens=40, **settings)


def same_stride(text: str) -> None:
    ids = characters(text)
    assert len(ids) == 40 and all(0 <= token < 94 for token in ids), text


def invoke() -> None:
    done = model.invoke("count")
    same_stride(str(done.content))
    assert done.usage_metadata and done.usage_metadata["output_tokens"] == 40


def stream() -> None:
    same_stride("".join(str(piece.content) for piece in model.stream("count")))


def batch() -> None:
    for done in model.batch([f"count {number}" for number in range(8)]):
        same_stride(str(done.content))


@tool
def switch(on: bool) -> str:
    """Switch a lamp."""
    return "done"


def tools() -> None:
    caller = ChatOpenAI(max_completion_tokens=400, **settings).bind_tools([switch], tool_choice="required", strict=True)
    question = HumanMessage("count")
    done: Any = caller.invoke([question])
    call = done.tool_calls[0]
    assert call["name"] == "switch" and isinstance(call["args"]["on"], bool), done
    model.bind_tools([switch], tool_choice="none").invoke([question, done, ToolMessage("done", tool_call_id=call["id"])])


class Lamp(BaseModel):
    on: bool


def structured() -> None:
    parsed = ChatOpenAI(max_completion_tokens=400, **settings).with_structured_output(Lamp, method="json_schema")
    assert isinstance(parsed.invoke("count"), Lamp)


def logprobs() -> None:
    done = ChatOpenAI(max_completion_tokens=5, logprobs=True, top_logprobs=2, **settings).invoke("count")
    assert len(done.response_metadata["logprobs"]["content"]) == 5


def responses() -> None:
    done = ChatOpenAI(max_completion_tokens=40, use_responses_api=True, **settings).invoke("count")
    same_stride(str(done.text))


def completions() -> None:
    same_stride(OpenAI(max_tokens=40, **settings).invoke("count"))


cases = [invoke, stream, batch, tools, structured, logprobs, responses, completions]
report("langchain-openai", version("langchain-openai"), cases)
