"""Rows as training samples, for supervised fine-tuning: nothing is sampled."""

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
    """token_ids int32[T]: prompt, answer, end of sequence. loss_mask uint8[T]: 1 over answer and
    end; of a conversation over each turn of the assistant.

    Example: ``17+25=`` with ``42``: 9 tokens, prompt_tokens 6, loss_mask 0 0 0 0 0 0 1 1 1.
    """

    token_ids: Ids
    loss_mask: NDArray[np.uint8]
    prompt_tokens: int
    prompt: str
    answer: str
    reward: float = 0.0
    """A label or margin of the data."""


class Supervised:
    """Turns rows into examples, batch by batch."""

    def __init__(self, text: Text, prompts: PromptReader, *, answer_field: str, train_on_prompt: bool, max_tokens: int) -> None:
        """max_tokens: longest example; a longer row is refused as CONTEXT_OVERFLOW, never cut.

        Raises :class:`PromptInvalid` where the tokenizer has no end-of-sequence token.
        """
        self._text, self._prompts, self._field = text, prompts, answer_field
        self._train_on_prompt, self._max_tokens = train_on_prompt, max_tokens
        self._end = end_of(text)

    def examples(self, rows: Sequence[bytes]) -> list[Example | Refusal]:
        """One a row (JSON), in order. A row without an answer whose messages end with the
        assistant's is a conversation."""
        talks = [conversation_in(row, self._prompts.field, self._field) for row in rows]
        answered = iter(self._answered([row for row, talk in zip(rows, talks, strict=True) if talk is None]))
        return [next(answered) if talk is None else self._conversation(talk) for talk in talks]

    def _conversation(self, messages: Messages) -> Example | Refusal:
        try:
            tokens, mask, prompt_tokens = turns_of(self._text, messages, self._end)
        except PromptInvalid as error:
            return Refusal(error.reason, str(error))
        if problem := too_long(len(tokens), self._max_tokens):
            return problem
        if self._train_on_prompt:
            mask = np.ones(len(tokens), np.uint8)
        [prompt] = self._text.decode([tokens[:prompt_tokens]])
        return Example(tokens, mask, prompt_tokens, prompt, str(messages[-1].get("content")))

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
                out.append(example_of(prompt, answer, ids, self._end, self._max_tokens, train_on_prompt=self._train_on_prompt))
        return out


def end_of(text: Text) -> Ids:
    """int32[1]: the end of a sequence. Raises :class:`PromptInvalid` where the tokenizer has
    none."""
    if text.eos_id is None:
        raise PromptInvalid("the model's tokenizer has no end-of-sequence token", fix="set `eos_token` in it")
    return np.array([text.eos_id], np.int32)


def text_field(row_json: bytes, field: str, key: str) -> str | PromptInvalid:
    """A field of a row that must be a text. key: where the configuration names it."""
    try:
        value = parse_row(row_json).get(field)
    except PromptInvalid as error:
        return error
    if isinstance(value, str):
        return value
    return PromptInvalid(f"field `{field}` is not text", fix=f"see `{key}`")


def example_of(prompt: Prompt, text: str, ids: Ids, end: Ids, limit: int, *, train_on_prompt: bool = False) -> Example | Refusal:
    """A prompt with a completion of tokens ``ids`` int32[N]; refused where prompt, completion and
    end exceed ``limit`` tokens."""
    tokens = np.concatenate((prompt.token_ids, ids, end))
    if problem := too_long(len(tokens), limit):
        return problem
    mask = np.ones(len(tokens), np.uint8)
    if not train_on_prompt:
        mask[: len(prompt.token_ids)] = 0
    return Example(tokens, mask, len(prompt.token_ids), prompt.text, text)


def too_long(tokens: int, limit: int) -> Refusal | None:
    """Why an example of so many tokens is refused, or None."""
    if tokens <= limit:
        return None
    return Refusal("CONTEXT_OVERFLOW", f"a row of {tokens} tokens exceeds `engine.max_model_len` = {limit}")
