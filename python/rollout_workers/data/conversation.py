"""Turns whole conversations into training examples. Every turn of the assistant is trained on, with
the tokens that the model would have generated."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollout_workers.data.prompts import Ids, Messages, PromptInvalid, Text, parse_row


def conversation_in(row_json: bytes, prompt_field: str, answer_field: str) -> Messages | None:
    """The messages of a row without an answer field whose last message is one of the assistant;
    None for other rows."""
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
    """token_ids int32[T] of a conversation, its loss_mask uint8[T], and the number of tokens before
    the first turn of the assistant.

    A turn begins after the generation prompt of the chat template and is tokenized from there, as a
    sampled turn is. It ends with the end-of-sequence token. If the template writes no such token, a
    turn ends with its message, and ``end`` (int32[1]) is added to the last one. Tokens after the
    last turn are dropped. Raises :class:`PromptInvalid` if the template refuses the messages, or if
    it writes messages differently once others follow: then no sampled conversation would have these
    tokens.
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
    """The text of the first ``count`` messages, with which ``whole`` must begin."""
    leading = text.render(messages[:count], answering=answering)
    if not whole.startswith(leading):
        raise PromptInvalid(
            f"the chat template writes the first {count} messages differently once others follow",
            fix="split the conversation into rows of a prompt and an answer",
        )
    return leading
