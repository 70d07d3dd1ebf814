"""Rows of preferences become the samples that the learner pairs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollout.environment import Refusal
from rollout_workers.data.preference import Labelled, Pairs
from rollout_workers.data.prompts import PromptReader, Text
from rollout_workers.data.supervised import Example, Limit


def reader(text: Text) -> PromptReader:
    return PromptReader(text, prompt_field="prompt", chat_template=False)


def pairs(text: Text, row: Any, margin: str = "", longest: int = 16) -> list[Example] | Refusal:
    made = Pairs(text, reader(text), chosen_field="chosen", rejected_field="rejected", margin_field=margin, limit=Limit(longest))
    return made.examples([json.dumps(row).encode()])[0]


def labelled(text: Text, row: Any) -> list[Example] | Refusal:
    made = Labelled(text, reader(text), completion_field="completion", label_field="label", limit=Limit(16))
    return made.examples([json.dumps(row).encode()])[0]


def test_a_pair_shares_its_prompt_and_carries_its_margin(text: Text) -> None:
    made = pairs(text, {"prompt": "1+2=", "chosen": "3", "rejected": "12", "by": 0.5}, "by")
    assert isinstance(made, list)
    chosen, rejected = made
    assert chosen.token_ids[:4].tolist() == rejected.token_ids[:4].tolist()
    assert chosen.loss_mask.tolist() == [0, 0, 0, 0, 1, 1] and rejected.loss_mask.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert (chosen.reward, rejected.reward) == (0.5, 0.0)
    assert chosen.token_ids[-1] == rejected.token_ids[-1] == text.eos_id


def test_a_pair_may_be_a_desirable_and_an_undesirable_completion(text: Text) -> None:
    fields = {"chosen_field": "chosen", "rejected_field": "rejected", "margin_field": ""}
    row = json.dumps({"prompt": "1+2=", "chosen": "3", "rejected": "12"}).encode()
    for margin in (0.0, 1.0):
        [made] = Pairs(text, reader(text), **fields, limit=Limit(16), margin=margin).examples([row])
        assert isinstance(made, list) and [example.reward for example in made] == [margin, 0.0]


@pytest.mark.parametrize("label", [True, False])
def test_a_label_is_the_reward(text: Text, label: bool) -> None:
    made = labelled(text, {"prompt": "1+2=", "completion": "3", "label": label})
    assert isinstance(made, list) and [example.reward for example in made] == [float(label)]


@pytest.mark.parametrize(
    ("row", "reason", "message"),
    [
        ({"prompt": "1+2=", "chosen": "3"}, "PROMPT_INVALID", "field `rejected` is not text"),
        ({"prompt": "1+2=", "chosen": 3, "rejected": "4"}, "PROMPT_INVALID", "field `chosen` is not text"),
        ({"chosen": "3", "rejected": "4"}, "PROMPT_INVALID", "field `prompt`"),
        ({"prompt": "1+2=", "chosen": "3", "rejected": "4" * 20}, "CONTEXT_OVERFLOW", "exceeds `engine.max_model_len` = 16"),
        ({"prompt": "1+2=", "chosen": "3", "rejected": "4", "by": "much"}, "PROMPT_INVALID", "field `by` is not a number"),
        ([], "PROMPT_INVALID", "not a JSON object"),
    ],
)
def test_a_row_that_is_no_pair_is_refused(text: Text, row: Any, reason: str, message: str) -> None:
    made = pairs(text, row, "by" if isinstance(row, dict) and "by" in row else "")
    assert isinstance(made, Refusal) and made.reason == reason and message in made.message


@pytest.mark.parametrize("label", [None, 1, "true"])
def test_a_label_out_of_its_set_is_refused(text: Text, label: Any) -> None:
    made = labelled(text, {"prompt": "1+2=", "completion": "3", "label": label})
    assert isinstance(made, Refusal) and "`label` is neither true nor false" in made.message
