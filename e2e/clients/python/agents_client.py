"""The client `openai-agents`, with the Responses API and with chat completions."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from case import KEY, MODEL, URL, report
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)


@function_tool
def switch(on: bool) -> str:
    """Switch a lamp."""
    return "done"


class Lamp(BaseModel):
    on: bool


def agent(kind: Any, client: AsyncOpenAI, **settings: Any) -> Agent[None]:
    """An agent whose answers end by themselves, because they have a schema: the client fails if a
    streamed response reaches its token limit."""
    policy = kind(model=MODEL, openai_client=client)
    chosen = ModelSettings(temperature=0, max_tokens=400, **settings)
    return Agent(name="counter", instructions="You count.", model=policy, model_settings=chosen, tools=[switch], output_type=Lamp)


async def play(kind: Any) -> None:
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=120) as client:
        first = await Runner.run(agent(kind, client), "count")
        assert isinstance(first.final_output, Lamp)
        again = await Runner.run(agent(kind, client), [*first.to_input_list(), {"role": "user", "content": "more"}])
        assert isinstance(again.final_output, Lamp)
        streamed = Runner.run_streamed(agent(kind, client), "count")
        assert [event async for event in streamed.stream_events()] and streamed.final_output
        # the tool is called once: `reset_tool_choice` lets the agent answer after it
        called = await Runner.run(agent(kind, client, tool_choice="required"), "count", max_turns=3)
        kinds = [item.type for item in called.new_items]
        assert "tool_call_item" in kinds and "tool_call_output_item" in kinds and called.final_output, kinds


def responses() -> None:
    asyncio.run(play(OpenAIResponsesModel))


def chat() -> None:
    asyncio.run(play(OpenAIChatCompletionsModel))


report("openai-agents", version("openai-agents"), [responses, chat])
