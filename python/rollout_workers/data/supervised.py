"""Turns rows into the training examples of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.environment import Refusal
from rollout_workers.data.conversation import Messages, conversation_in, turns_of
from rollout_workers.data.prompts import Ids, Prompt, PromptInvalid, PromptReader, Text, parse_row


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """token_ids int32[T]: prompt, answer, end of sequence. loss_mask uint8[T]: 1 for tokens of the
    answer and the end; in a conversation for each turn of the assistant.

    Example: ``17+25=`` with ``42``: 9 tokens, prompt_tokens 6, loss_mask 0 0 0 0 0 0 1 1 1.
    """

    token_ids: Ids
    loss_mask: NDArray[np.uint8]
    prompt_tokens: int
    prompt: str
    answer: str
    reward: float = 0.0
    """The label or margin of the row."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The most tokens of an example, and what happens to a longer one: its end is cut, or it is
    refused as CONTEXT_OVERFLOW."""

    tokens: int
    truncate: bool = False

    def fit(self, tokens: Ids, prompt_tokens: int) -> Ids | Refusal:
        """The tokens of an example (int32[T]), without those beyond the limit."""
        if len(tokens) <= self.tokens:
            return tokens
        if not self.truncate:
            return Refusal("CONTEXT_OVERFLOW", f"a row of {len(tokens)} tokens exceeds `engine.max_model_len` = {self.tokens}")
        if prompt_tokens >= self.tokens:
            return Refusal(
                "CONTEXT_OVERFLOW", f"the prompt of {prompt_tokens} tokens leaves no token to train on within {self.tokens}"
            )
        return tokens[: self.tokens]


class Supervised:
    """Turns rows into examples, in batches."""

    def __init__(self, text: Text, prompts: PromptReader, *, answer_field: str, train_on_prompt: bool, limit: Limit) -> None:
        """Raises :class:`PromptInvalid` if the tokenizer has no end-of-sequence token."""
        self._text, self._prompts, self._field = text, prompts, answer_field
        self._train_on_prompt, self._limit = train_on_prompt, limit
        self._end = end_of(text)

    def examples(self, rows: Sequence[bytes]) -> list[Example | Refusal]:
        """The example of each row (JSON), in order. A row without an answer whose messages end with
        one of the assistant is a conversation."""
        talks = [conversation_in(row, self._prompts.field, self._field) for row in rows]
        answered = iter(self._answered([row for row, talk in zip(rows, talks, strict=True) if talk is None]))
        return [next(answered) if talk is None else self._conversation(talk) for talk in talks]

    def _conversation(self, messages: Messages) -> Example | Refusal:
        try:
            tokens, mask, prompt_tokens = turns_of(self._text, messages, self._end)
        except PromptInvalid as error:
            return Refusal(error.reason, str(error))
        fitting = self._limit.fit(tokens, prompt_tokens)
        if isinstance(fitting, Refusal):
            return fitting
        tokens, mask = fitting, mask[: len(fitting)]
        if self._train_on_prompt:
            mask = np.ones(len(tokens), np.uint8)
        [prompt] = self._text.decode([tokens[:prompt_tokens]])
        return Example(tokens, mask, prompt_tokens, prompt, messages[-1].get("content") or "")

    def _answered(self, rows: Sequence[bytes]) -> list[Example | Refusal]:
        prompts = self._prompts.read(rows)
        answers = [text_field(row, self._field, "data.answer_field") for row in rows]
        encoded = self._text.following([a if isinstance(a, str) else "" for a in answers], prompts)
        out: list[Example | Refusal] = []
        for prompt, answer, ids in zip(prompts, answers, encoded, strict=True):
            if isinstance(prompt, PromptInvalid):
                out.append(Refusal(prompt.reason, str(prompt)))
            elif isinstance(answer, PromptInvalid):
                out.append(Refusal(answer.reason, str(answer)))
            else:
                out.append(example_of(prompt, answer, ids, self._end, self._limit, train_on_prompt=self._train_on_prompt))
        return out


def end_of(text: Text) -> Ids:
    """int32[1]: the end-of-sequence token. Raises :class:`PromptInvalid` if the tokenizer has
    none."""
    if text.eos_id is None:
        raise PromptInvalid("the model's tokenizer has no end-of-sequence token", fix="set `eos_token` in it")
    return np.array([text.eos_id], np.int32)


def text_field(row_json: bytes, field: str, key: str) -> str | PromptInvalid:
    """A field of a row that must be a text. key: the configuration key that names the field."""
    try:
        value = parse_row(row_json).get(field)
    except PromptInvalid as error:
        return error
    if isinstance(value, str):
        return value
    return PromptInvalid(f"field `{field}` is not text", fix=f"see `{key}`")


def example_of(
    prompt: Prompt, text: str, ids: Ids, end: Ids, limit: Limit, *, train_on_prompt: bool = False
) -> Example | Refusal:
    """A prompt with a completion, whose tokens are ``ids`` int32[N]."""
    tokens = limit.fit(np.concatenate((prompt.token_ids, ids, end)), len(prompt.token_ids))
    if isinstance(tokens, Refusal):
        return tokens
    mask = np.ones(len(tokens), np.uint8)
    if not train_on_prompt:
        mask[: len(prompt.token_ids)] = 0
    return Example(tokens, mask, len(prompt.token_ids), prompt.text, text)
