"""Chooses how a run that trains on rows turns them into examples."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rollout.algorithm import name_of, traits
from rollout.config.v1 import options_pb2
from rollout.config.v1.run_config_pb2 import RunConfig
from rollout.dialogue import plain_row
from rollout.environment import Refusal
from rollout_workers.data.preference import Labelled, Pairs
from rollout_workers.data.prompts import PromptInvalid, PromptReader, Text, parse_row
from rollout_workers.data.supervised import Example, Limit, Supervised


class Rows:
    """Turns the rows of a file into examples. Completions may be messages."""

    def __init__(self, made_by: Supervised | Pairs | Labelled, prompt_field: str, fields: Sequence[str]) -> None:
        """fields: those with completions."""
        self._made_by, self._prompt_field, self._fields = made_by, prompt_field, fields

    def examples(self, rows: Sequence[bytes]) -> list[Example | list[Example] | Refusal]:
        """The examples of each row (JSON), in order: one, the two of a pair, or the reason for
        which the row is refused."""
        read = [self._plain(row) for row in rows]
        made = iter(self._made_by.examples([row for row in read if isinstance(row, bytes)]))
        return [next(made) if isinstance(row, bytes) else row for row in read]

    def _plain(self, row: bytes) -> bytes | Refusal:
        if b'"role"' not in row:
            return row
        try:
            whole = parse_row(row)
            plain = plain_row(whole, self._prompt_field, self._fields)
        except (PromptInvalid, ValueError) as error:
            return Refusal(PromptInvalid.reason, str(error))
        return row if plain is whole else json.dumps(plain).encode()


def rows_of(config: RunConfig, text: Text, prompts: PromptReader) -> Rows | None:
    """The maker of examples of a run that trains on rows; None for a run that samples."""
    data, kind = config.data, name_of(config)
    limit = Limit(config.engine.max_model_len, truncate=data.overlong == "truncate")
    row = traits(kind).rows
    if row == options_pb2.ROW_KIND_ANSWER:
        train_on_prompt = config.algorithm.sft.train_on_prompt
        answers = Supervised(text, prompts, answer_field=data.answer_field, train_on_prompt=train_on_prompt, limit=limit)
        return Rows(answers, data.prompt_field, [data.answer_field])
    if row == options_pb2.ROW_KIND_PAIR or config.algorithm.kto.paired:
        pairs = Pairs(
            text,
            prompts,
            chosen_field=data.chosen_field,
            rejected_field=data.rejected_field,
            margin_field=data.margin_field if kind == "reward_model" else "",
            margin=1.0 if kind == "kto" else 0.0,  # above 0: the desirable one
            limit=limit,
        )
        return Rows(pairs, data.prompt_field, [data.chosen_field, data.rejected_field])
    if row == options_pb2.ROW_KIND_LABELED:
        labelled = Labelled(text, prompts, completion_field=data.completion_field, label_field=data.label_field, limit=limit)
        return Rows(labelled, data.prompt_field, [data.completion_field])
    return None
