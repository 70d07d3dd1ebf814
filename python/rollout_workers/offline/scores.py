"""The scores of an evaluation, one line per row, for its metrics: ``SUITE.scores.jsonl``.

The first line has the inputs (see ``inputs``) and the facts of the ``end`` event. The file is
written last, so that an evaluation whose file has the same inputs has ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rollout_workers.offline.errors import BadDataset, InputsChanged, JournalDamaged
from rollout_workers.offline.journal import differences
from rollout_workers.offline.output import write_lines

FORMAT = 1
_SHOWN_ROWS = 20
_SHOWN_SAMPLES = 4
_SHOWN_CHARACTERS = 4000


def write(path: str, inputs: Mapping[str, Any], end: Mapping[str, Any], rows: Iterable[dict[str, Any]]) -> None:
    """Raises ``CannotWrite``."""

    def lines() -> Iterator[dict[str, Any]]:
        yield {"rollout_scores": FORMAT, "inputs": dict(inputs), "end": dict(end)}
        yield from rows

    write_lines(path, lines())


def ended(path: str, inputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The facts of the end of an evaluation with the same inputs; None without one. Raises
    :class:`InputsChanged`, :class:`JournalDamaged`."""
    try:
        with open(path, encoding="utf-8") as file:
            head = json.loads(file.readline())
        known, end = head["inputs"], dict(head["end"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JournalDamaged(f"{path} is not a file of scores: {error}", fix="remove it or pass --restart") from error
    changes = differences(known, json.loads(json.dumps(inputs)))
    if changes:
        raise InputsChanged(
            f"{path} was written with other inputs: {'; '.join(changes)}",
            fix="use the same inputs, name another folder, or start again with --restart",
        )
    return end


def of_row(row: int, data: bytes, samples: Sequence[Mapping[str, Any]], cluster: str) -> dict[str, Any]:
    """The line of one row: the scores of its samples, null where one has none, and further numbers
    of the reward by name. The first rows have texts, too. Raises :class:`BadDataset`."""
    line: dict[str, Any] = {"row": row, "scores": [sample["score"] for sample in samples]}
    parts: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample["score_parts"].items():
            parts.setdefault(name, []).append(value)
    if parts:
        line["parts"] = parts
    if cluster:
        fields = json.loads(data)
        if cluster not in fields:
            raise BadDataset(f"row {row} has no field `{cluster}`", fix="correct `cluster` of the suite")
        line["cluster"] = json.dumps(fields[cluster], ensure_ascii=False, sort_keys=True)
    if row < _SHOWN_ROWS:
        line["prompt"] = samples[0]["prompt"][:_SHOWN_CHARACTERS] if samples else ""
        line["completions"] = [sample["completion"][:_SHOWN_CHARACTERS] for sample in samples[:_SHOWN_SAMPLES]]
    return line
