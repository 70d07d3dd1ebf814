"""The evaluations of `inspect-ai`, through chat completions and through its own client of each
API."""

from __future__ import annotations

import os
from importlib.metadata import version
from tempfile import TemporaryDirectory
from typing import Any

from case import KEY, MODEL, URL, report

os.environ |= {"LOCAL_BASE_URL": f"{URL}/v1", "LOCAL_API_KEY": KEY, "INSPECT_DISPLAY": "none", "HF_HUB_OFFLINE": "1"}

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, ResponseSchema, get_model
from inspect_ai.scorer import match, pattern
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool
from inspect_ai.util import json_schema
from pydantic import BaseModel

LOGS = TemporaryDirectory()
"""Samples are read from it when they are used."""


def evaluated(model: Any, task: Task, **settings: Any) -> Any:
    """The log of an evaluation, which must succeed without a retry."""
    (log,) = eval(task, model=model, log_dir=LOGS.name, temperature=0, max_retries=0, display="none", **settings)
    assert log.status == "success" and log.samples and not any(sample.error for sample in log.samples), log.error
    return log


def questions(count: int = 8) -> list[Sample]:
    return [Sample(input=f"count {number}", target="!") for number in range(count)]


def chat() -> None:
    log = evaluated(f"openai-api/local/{MODEL}", Task(questions(), solver=generate(), scorer=match()), max_tokens=40)
    assert all(len(sample.output.completion) == 40 for sample in log.samples)
    assert log.stats.model_usage[f"openai-api/local/{MODEL}"].output_tokens == 320


def anthropic() -> None:
    model = get_model(f"anthropic/{MODEL}", base_url=URL, api_key=KEY, streaming=False, memoize=False)
    evaluated(model, Task(questions(2), solver=generate(), scorer=match()), max_tokens=40)


def responses() -> None:
    model = get_model(f"openai/{MODEL}", base_url=f"{URL}/v1", api_key=KEY, responses_api=True, memoize=False)
    evaluated(model, Task(questions(2), solver=generate(), scorer=match()), max_tokens=40)


class Lamp(BaseModel):
    on: bool


def structured() -> None:
    schema = ResponseSchema(name="lamp", json_schema=json_schema(Lamp))
    task = Task(questions(2), solver=generate(), scorer=pattern(r"(true|false)"), config=GenerateConfig(response_schema=schema))
    log = evaluated(f"openai-api/local/{MODEL}", task, max_tokens=400)
    assert all(isinstance(Lamp.model_validate_json(sample.output.completion).on, bool) for sample in log.samples)


@tool
def switch():
    async def execute(on: bool) -> str:
        """Switch a lamp.

        Args:
            on: Whether it is on.
        """
        return "done"

    return execute


def tools() -> None:
    solver = [use_tools(switch(), tool_choice="any"), generate(tool_calls="single")]
    log = evaluated(f"openai-api/local/{MODEL}", Task(questions(2), solver=solver, scorer=match()), max_tokens=400)
    assert all(any(message.role == "tool" for message in sample.messages) for sample in log.samples)


report("inspect-ai", version("inspect-ai"), [chat, anthropic, responses, structured, tools])
