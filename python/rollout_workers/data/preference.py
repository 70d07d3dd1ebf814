"""Turns rows of preferences into training examples: pairs of completions, or completions with a
label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rollout.environment import Refusal
from rollout_workers.data.prompts import Prompt, PromptInvalid, PromptReader, Text, parse_row
from rollout_workers.data.supervised import Example, Limit, end_of, example_of, text_field


class Pairs:
    """Rows ``{"prompt": ..., "chosen": ..., "rejected": ...}``, with a number in ``margin_field``
    if that is set."""

    def __init__(
        self,
        text: Text,
        prompts: PromptReader,
        *,
        chosen_field: str,
        rejected_field: str,
        margin_field: str,
        limit: Limit,
        margin: float = 0.0,
    ) -> None:
        """margin: the margin of all rows if ``margin_field`` is empty. Raises
        :class:`PromptInvalid`."""
        self._text, self._prompts, self._end = text, prompts, end_of(text)
        self._fields, self._margin, self._limit = (chosen_field, rejected_field), margin_field, limit
        self._usual = margin

    def examples(self, rows: Sequence[bytes]) -> list[list[Example] | Refusal]:
        """The two examples of each row (JSON), in order: the chosen completion, whose reward is the
        margin, and the rejected one."""
        prompts = self._prompts.read(rows)
        texts = [[text_field(row, field, "data.chosen_field, data.rejected_field") for field in self._fields] for row in rows]
        flat = [text if isinstance(text, str) else "" for pair in texts for text in pair]
        ids = self._text.following(flat, [prompt for prompt in prompts for _ in self._fields])
        out: list[list[Example] | Refusal] = []
        for number, (row, prompt, pair) in enumerate(zip(rows, prompts, texts, strict=True)):
            margin = self._margin_of(row)
            if problem := first_problem(prompt, *pair, margin):
                out.append(Refusal(problem.reason, str(problem)))
                continue
            assert isinstance(prompt, Prompt) and isinstance(margin, float)
            made = [example_of(prompt, flat[place], ids[place], self._end, self._limit) for place in (2 * number, 2 * number + 1)]
            refusal = next((example for example in made if isinstance(example, Refusal)), None)
            examples = [example for example in made if isinstance(example, Example)]
            out.append(refusal or [replace(examples[0], reward=margin), examples[1]])
        return out

    def _margin_of(self, row: bytes) -> float | PromptInvalid:
        if not self._margin:
            return self._usual
        try:
            value = parse_row(row).get(self._margin)
        except PromptInvalid as error:
            return error
        if isinstance(value, (int, float)) and not isinstance(value, bool) and np.isfinite(value):
            return float(value)
        return PromptInvalid(f"field `{self._margin}` is not a number", fix="see `data.margin_field`")


class Labelled:
    """Rows ``{"prompt": ..., "completion": ..., "label": true}``; the reward is the label, 1 or
    0."""

    def __init__(self, text: Text, prompts: PromptReader, *, completion_field: str, label_field: str, limit: Limit) -> None:
        """Raises :class:`PromptInvalid`."""
        self._text, self._prompts, self._end = text, prompts, end_of(text)
        self._completion, self._label, self._limit = completion_field, label_field, limit

    def examples(self, rows: Sequence[bytes]) -> list[list[Example] | Refusal]:
        """The example of each row (JSON), in order."""
        prompts = self._prompts.read(rows)
        texts = [text_field(row, self._completion, "data.completion_field") for row in rows]
        ids = self._text.following([text if isinstance(text, str) else "" for text in texts], prompts)
        out: list[list[Example] | Refusal] = []
        for row, prompt, text, tokens in zip(rows, prompts, texts, ids, strict=True):
            label = self._label_of(row)
            if problem := first_problem(prompt, text, label):
                out.append(Refusal(problem.reason, str(problem)))
                continue
            assert isinstance(prompt, Prompt) and isinstance(text, str) and isinstance(label, bool)
            made = example_of(prompt, text, tokens, self._end, self._limit)
            out.append(made if isinstance(made, Refusal) else [replace(made, reward=float(label))])
        return out

    def _label_of(self, row: bytes) -> bool | PromptInvalid:
        try:
            value = parse_row(row).get(self._label)
        except PromptInvalid as error:
            return error
        if isinstance(value, bool):
            return value
        return PromptInvalid(f"field `{self._label}` is neither true nor false", fix="see `data.label_field`")


def first_problem(*parts: object) -> PromptInvalid | None:
    """The first part that is an error."""
    return next((part for part in parts if isinstance(part, PromptInvalid)), None)
