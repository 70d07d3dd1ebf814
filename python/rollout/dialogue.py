"""Turns rows with completions as messages, as in public datasets, into a prompt and texts.

``services/planner/input/dialogue.go`` is the same code for the planner;
``schemas/golden/dialogue_rows.json`` tests both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

Turn = tuple[str, str]


def plain_row(row: Mapping[str, Any], prompt_field: str, fields: Sequence[str]) -> Mapping[str, Any]:
    """The row with the completions in ``fields`` as texts; the same object if they are texts
    already.

    A completion may be a list of ``{"role", "content"}``. The last message, of the assistant, is
    the completion. The messages before it are the prompt, which the row may repeat in its prompt
    field (as messages, or as the text of the last one); there may be none. Raises ``ValueError`` if
    they disagree.
    """
    talks: dict[str, list[Any]] = {field: row[field] for field in fields if isinstance(row.get(field), list)}
    if not talks:
        return row
    out, first, before = dict(row), next(iter(talks)), list[Turn]()
    for field, messages in talks.items():
        turns = _turns(messages)
        if not turns:
            raise ValueError(f"`{field}` is not a list of messages with the strings `role` and `content`")
        *leading, (role, out[field]) = turns
        if role != "assistant":
            raise ValueError(f"`{field}` does not end with the assistant's message")
        if field != first and leading != before:
            raise ValueError(f"`{first}` and `{field}` do not start with the same messages")
        before = leading
    if before:
        prompt = row.get(prompt_field)
        whole = isinstance(prompt, list) and _turns(cast("list[Any]", prompt)) == before
        if prompt is not None and not whole and before[-1] != ("user", prompt):
            raise ValueError(f"the messages before the last one of `{first}` differ from `{prompt_field}`")
        out[prompt_field] = talks[first][:-1]
    return out


def _turns(messages: list[Any]) -> list[Turn]:
    """Role and content of each message; empty if one of them lacks either."""
    turns: list[Turn] = []
    for message in messages:
        match message:
            case {"role": str(role), "content": str(content)}:
                turns.append((role, content))
            case _:
                return []
    return turns
