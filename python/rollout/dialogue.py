"""Rows as public datasets have them, whose completions are messages: brought to a prompt and texts.

``services/planner/input/dialogue.go`` is the same for the planner; ``schemas/golden/dialogue_rows.json`` holds both to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

Said = tuple[str, str]


def plain_row(row: Mapping[str, Any], prompt_field: str, fields: Sequence[str]) -> Mapping[str, Any]:
    """The row with the completions in ``fields`` as texts; itself where they are.

    A completion may be a list of ``{"role", "content"}``, of which the last is the assistant's: that one is the completion. Those
    before it lead there: they are the prompt, which the row may name beside them (whole, or as the text of the last of them), or
    there are none. Raises ``ValueError`` where they disagree.
    """
    talks: dict[str, list[Any]] = {field: row[field] for field in fields if isinstance(row.get(field), list)}
    if not talks:
        return row
    out, first, before = dict(row), next(iter(talks)), list[Said]()
    for field, messages in talks.items():
        said = _said(messages)
        if not said:
            raise ValueError(f"`{field}` is not a list of messages with the strings `role` and `content`")
        *leading, (role, out[field]) = said
        if role != "assistant":
            raise ValueError(f"`{field}` does not end with the assistant's message")
        if field != first and leading != before:
            raise ValueError(f"`{first}` and `{field}` do not start with the same messages")
        before = leading
    if before:
        prompt = row.get(prompt_field)
        whole = isinstance(prompt, list) and _said(cast("list[Any]", prompt)) == before
        if prompt is not None and not whole and before[-1] != ("user", prompt):
            raise ValueError(f"the messages before the last one of `{first}` differ from `{prompt_field}`")
        out[prompt_field] = talks[first][:-1]
    return out


def _said(messages: list[Any]) -> list[Said]:
    """Role and content of each message; empty where one has not both."""
    said: list[Said] = []
    for message in messages:
        match message:
            case {"role": str(role), "content": str(content)}:
                said.append((role, content))
            case _:
                return []
    return said
