"""Reads JSON Lines datasets: one JSON object per line. Rows count from 0, as in the plan."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rollout.errors import Place, RolloutError

Message: TypeAlias = Mapping[str, str]  # role and content
Prompt: TypeAlias = str | Sequence[Message]


class BadRow(RolloutError):
    """A line is not a JSON object, or lacks a field."""

    reason = "BAD_ROW"


def rows(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file in order. Raises :class:`BadRow`, ``OSError``."""
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            place = Place(str(path), number)
            try:
                row = json.loads(line)
            except ValueError as error:
                raise BadRow(f"the row is not JSON: {error}", place=place) from error
            if not isinstance(row, dict):
                raise BadRow(f"the row is a {type(row).__name__}, not an object", place=place)
            yield row


def prompts(path: str | os.PathLike[str], prompt_field: str) -> Iterator[Prompt]:
    """Yield the prompt of each row: a text or a list of messages. Raises :class:`BadRow`,
    ``OSError``."""
    for number, row in enumerate(rows(path), 1):
        if prompt_field not in row:
            raise BadRow(f"the row has no `{prompt_field}`", place=Place(str(path), number))
        yield row[prompt_field]
