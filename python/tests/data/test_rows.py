"""Rows whose completions are messages train on what the same rows of texts do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from rollout.config.v1.run_config_pb2 import RunConfig
from rollout.dialogue import plain_row
from rollout.environment import Refusal
from rollout_workers.data.prompts import PromptReader, Text
from rollout_workers.data.rows import rows_of
from rollout_workers.data.supervised import Example

GOLDEN = Path(__file__).parents[3] / "schemas" / "golden" / "dialogue_rows.json"
VECTORS: list[dict[str, Any]] = json.loads(GOLDEN.read_text())
NAMES = {
    "prompt_field": "prompt", "answer_field": "answer", "chosen_field": "chosen", "rejected_field": "rejected",
    "completion_field": "completion", "label_field": "label",
}  # fmt: skip


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_a_row_is_read_as_the_planner_reads_it(vector: dict[str, Any]) -> None:
    if "problem" in vector:
        with pytest.raises(ValueError) as caught:
            plain_row(vector["row"], "prompt", vector["fields"])
        assert str(caught.value) == vector["problem"]
    else:
        assert plain_row(vector["row"], "prompt", vector["fields"]) == vector["plain"]


def made(text: Text, algorithm: str, row: dict[str, Any]) -> list[Example] | Refusal:
    text.tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tables = {"algorithm": {algorithm: {}}, "data": NAMES, "engine": {"max_model_len": 32}}
    rows = rows_of(
        json_format.ParseDict(tables, RunConfig()), text, PromptReader(text, prompt_field="prompt", chat_template=True)
    )
    assert rows is not None
    other = json.dumps({"prompt": "1+1="}).encode()
    _, found, _ = rows.examples([other, json.dumps(row).encode(), other])
    return [found] if isinstance(found, Example) else found


def talk(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[turn % 2], "content": content} for turn, content in enumerate(contents)]


@pytest.mark.parametrize(
    ("algorithm", "texts", "messages"),
    [
        ("dpo", {"chosen": "3", "rejected": "4"}, {"chosen": talk("1+2=", "3"), "rejected": talk("1+2=", "4")}),
        ("reward_model", {"chosen": "3", "rejected": "4"}, {"prompt": "1+2=", "chosen": talk("1+2=", "3"), "rejected": "4"}),
        ("kto", {"completion": "3", "label": True}, {"prompt": talk("1+2="), "completion": talk("", "3")[1:], "label": True}),
        ("sft", {"answer": "3"}, {"prompt": talk("1+2="), "answer": talk("1+2=", "3")}),
    ],
)
def test_messages_become_the_tokens_of_texts(text: Text, algorithm: str, texts: dict[str, Any], messages: dict[str, Any]) -> None:
    wanted, found = made(text, algorithm, {"prompt": "1+2=", **texts}), made(text, algorithm, messages)
    assert isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found)
    for one, other in zip(wanted, found, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist() and one.loss_mask.tolist() == other.loss_mask.tolist()
        assert (one.prompt, one.answer, one.reward, one.prompt_tokens) == (other.prompt, other.answer, other.reward, 4)


def test_a_row_that_contradicts_itself_is_refused_and_no_other(text: Text) -> None:
    found = made(text, "dpo", {"chosen": talk("1+2=", "3"), "rejected": talk("1+3=", "4")})
    assert found == Refusal("PROMPT_INVALID", "`chosen` and `rejected` do not start with the same messages")
