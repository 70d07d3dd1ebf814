"""Gives the rows of a data set the completions of another model, for a judge to compare with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rollout.source.errors import BadBaseline
from rollout.source.formats import read_file

FIELD = "baseline"


def with_baseline(rows: Sequence[bytes], path: str) -> list[bytes]:
    """The rows, each with the first completion that the output at ``path`` has for it. Raises
    :class:`BadBaseline`, ``SourceError``."""
    completions: dict[int, tuple[dict[str, Any], str]] = {}
    for number, line in enumerate(read_file(path), 1):
        record = json.loads(line)
        try:
            place, completion, data = int(record["row"]), str(record["completion"]), record["data"]
        except (KeyError, TypeError, ValueError):
            raise BadBaseline(
                f"line {number} of {path} has no `row`, `completion` and `data`",
                fix="name an output of `rollout eval` or `rollout infer batch`",
            ) from None
        completions.setdefault(place, (json.loads(data) if isinstance(data, str) else data, completion))
    return [_joined(number, json.loads(row), completions.get(number), path) for number, row in enumerate(rows)]


def _joined(number: int, row: Any, found: tuple[dict[str, Any], str] | None, path: str) -> bytes:
    if found is None:
        raise BadBaseline(
            f"{path} has no completion for row {number}", fix="write it from the same data, with at least as many rows"
        )
    data, completion = found
    if {**data, FIELD: None} != {**row, FIELD: None}:
        raise BadBaseline(f"{path} was written for other data: row {number} differs", fix="write it from the same data")
    return json.dumps({**row, FIELD: completion}, ensure_ascii=False, separators=(",", ":")).encode()
