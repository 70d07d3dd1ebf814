"""Whole conversations as training samples: every turn of the assistant is trained on, as the model
would have written it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_workers.data.prompts import Ids, PromptInvalid, Text, parse_row

Messages = Sequence[Mapping[str, Any]]


def conversation_in(row_json: bytes, prompt_field: str, answer_field: str) -> Messages | None:
    """The messages of a row without an answer field whose last message is the assistant's; None for
    every other row."""
    try:
        row = parse_row(row_json)
    except PromptInvalid:
        return None
    messages = row.get(prompt_field)
    if answer_field in row or not isinstance(messages, list) or not messages:
        return None
    last = messages[-1]
    return messages if isinstance(last, dict) and last.get("role") == "assistant" else None


def turns_of(text: Text, messages: Messages, end: Ids) -> tuple[Ids, NDArray[np.uint8], int]:
    """token_ids int32[T] of a conversation, its loss_mask uint8[T], and how many tokens precede the
    first turn of the assistant.

    A turn begins where the chat template would have the model begin to write, is tokenised from
    there on, as it is when it is sampled, and ends with the end of sequence; where the template
    writes none, with the message, and the last one with ``end`` (int32[1]). Nothing after the last
    turn is kept. Raises :class:`PromptInvalid` where the template refuses the messages, or writes
    earlier ones differently once others follow, so that no sampled conversation would look like
    this one.
    """
    whole = text.render(messages, answering=False)
    turns = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
    begins = [len(_leading(text, whole, messages, turn, answering=True)) for turn in turns]
    pieces = [whole[a:b] for a, b in zip([0, *begins], [*begins, len(whole)], strict=True)]
    encoded = text.encode(pieces, special=False)
    encoded[1:] = text.following(pieces[1:], encoded[:-1])
    ids, masks = [encoded[0]], [np.zeros(len(encoded[0]), np.uint8)]
    for turn, begin, piece, tokens in zip(turns, begins, pieces[1:], encoded[1:], strict=True):
        stops = np.flatnonzero(tokens == end[0])
        if len(stops):
            trained, rest = tokens[: stops[0] + 1], tokens[stops[0] + 1 :]
        else:
            length = len(_leading(text, whole, messages, turn + 1, answering=False)) - begin
            trained, rest = text.following([piece[:length], piece[length:]], [ids[-1], tokens[:0]])
        if turn == turns[-1]:
            trained, rest = trained if len(stops) else np.concatenate((trained, end)), rest[:0]
        ids += trained, rest
        masks += np.ones(len(trained), np.uint8), np.zeros(len(rest), np.uint8)
    return np.concatenate(ids), np.concatenate(masks), len(encoded[0])


def _leading(text: Text, whole: str, messages: Messages, count: int, *, answering: bool) -> str:
    """The first messages as the template writes them, which must be how ``whole`` begins."""
    leading = text.render(messages[:count], answering=answering)
    if not whole.startswith(leading):
        raise PromptInvalid(
            f"the chat template writes the first {count} messages differently once others follow",
            fix="split the conversation into rows of a prompt and an answer",
        )
    return leading
