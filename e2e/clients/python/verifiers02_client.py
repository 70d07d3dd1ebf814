"""The environments of `verifiers` 0.2.1, with each of its clients."""

from __future__ import annotations

import asyncio
import os
import sys
from importlib.metadata import version
from typing import Any

from case import KEY, MODEL, URL, report
from datasets import Dataset

os.environ |= {"ROLLOUT_KEY": KEY, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import verifiers as vf
from verifiers.types import ClientConfig

ROWS = Dataset.from_list([{"question": f"count {number}", "answer": "!"} for number in range(4)])


def length(completion: list[Any], **_: Any) -> float:
    return float(len(completion))


class Turns(vf.MultiTurnEnv):
    """Three turns, which continue each other."""

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        return [vf.UserMessage(content="more")]


def played(environment: Any, kind: str, turns: int, base: str = f"{URL}/v1", **settings: Any) -> Any:
    client = ClientConfig(
        client_type=kind,
        api_key_var="ROLLOUT_KEY",
        api_base_url=base,
        max_retries=0,
        extra_headers_from_state={"X-Session-ID": "trajectory_id"},
        **settings,
    )
    done = asyncio.run(
        environment.evaluate(
            client, MODEL, sampling_args={"max_tokens": 40, "temperature": 0}, num_examples=4, rollouts_per_example=2
        )
    )
    for output in done["outputs"]:
        assert not output.get("error"), output["error"]
        said = [message for message in output["completion"] if message["role"] == "assistant"]
        assert len(said) == turns, output["completion"]
    return done


def single() -> Any:
    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[length]))


def chat() -> None:
    played(single(), "openai_chat_completions", 1)


def turns() -> None:
    played(Turns(dataset=ROWS, rubric=vf.Rubric(funcs=[length]), max_turns=3), "openai_chat_completions", 3)


def responses() -> None:
    played(single(), "openai_responses", 1)


def anthropic() -> None:
    played(single(), "anthropic_messages", 1, URL)


def token_ids() -> None:
    """The client for training: it renders, and sends and receives token ids."""
    environment = Turns(dataset=ROWS, rubric=vf.Rubric(funcs=[length]), max_turns=3)
    played(environment, "renderer", 3, renderer_model_name=sys.argv[5])


report("verifiers", version("verifiers"), [chat, turns, responses, anthropic, token_ids])
