"""Rows as training samples, for supervised fine-tuning: nothing is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout_workers.harness.environment import Refusal
from rollout_workers.harness.prompts import Ids, PromptInvalid, PromptReader, Text, parse_row


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """token_ids int32[T]: prompt, answer, end of sequence. loss_mask uint8[T]: 1 over answer and end.

    Example: ``17+25=`` with ``42``: 9 tokens, prompt_tokens 6, loss_mask 0 0 0 0 0 0 1 1 1.
    """

    token_ids: Ids
    loss_mask: NDArray[np.uint8]
    prompt_tokens: int
    prompt: str
    answer: str


class Supervised:
    """Turns rows into examples, batch by batch."""

    def __init__(self, text: Text, prompts: PromptReader, *, answer_field: str, train_on_prompt: bool, max_tokens: int) -> None:
        """max_tokens: longest example; a longer row is refused as CONTEXT_OVERFLOW, never cut.

        Raises :class:`PromptInvalid` where the tokenizer has no end-of-sequence token.
        """
        if text.eos_id is None:
            raise PromptInvalid("the model's tokenizer has no end-of-sequence token", mend="set `eos_token` in it")
        self._text, self._prompts, self._field = text, prompts, answer_field
        self._train_on_prompt, self._max_tokens = train_on_prompt, max_tokens
        self._eos = np.array([text.eos_id], np.int32)

    def examples(self, rows: Sequence[bytes]) -> list[Example | Refusal]:
        """One a row (JSON), in order."""
        prompts = self._prompts.read(rows)
        answers = [self._answer(row) for row in rows]
        encoded = self._text.encode([a if isinstance(a, str) else "" for a in answers], special=False)
        out: list[Example | Refusal] = []
        for prompt, answer, ids in zip(prompts, answers, encoded, strict=True):
            problem = next((p for p in (prompt, answer) if isinstance(p, PromptInvalid)), None)
            if problem is not None or isinstance(prompt, PromptInvalid) or isinstance(answer, PromptInvalid):
                assert problem is not None
                out.append(Refusal(problem.reason, str(problem)))
                continue
            tokens = np.concatenate((prompt.token_ids, ids, self._eos))
            if len(tokens) > self._max_tokens:
                told = f"a row of {len(tokens)} tokens exceeds `engine.max_model_len` = {self._max_tokens}"
                out.append(Refusal("CONTEXT_OVERFLOW", told))
                continue
            mask = np.ones(len(tokens), np.uint8)
            if not self._train_on_prompt:
                mask[: len(prompt.token_ids)] = 0
            out.append(Example(tokens, mask, len(prompt.token_ids), prompt.text, answer))
        return out

    def _answer(self, row_json: bytes) -> str | PromptInvalid:
        try:
            value = parse_row(row_json).get(self._field)
        except PromptInvalid as error:
            return error
        if isinstance(value, str):
            return value
        return PromptInvalid(f"field `{self._field}` is no text", mend="see `data.answer_field`")
