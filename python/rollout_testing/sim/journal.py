"""A journal of what a process did, in a file per process: one JSON object a line, appended with one
write."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Journal:
    """``<run directory>/journal/<name>.jsonl``. A line that a kill cut off has no end and counts
    for nothing."""

    def __init__(self, run_directory: str, name: str) -> None:
        folder = Path(run_directory) / "journal"
        folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(folder / f"{name}.jsonl", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        os.write(self._descriptor, b"\n")  # ends what the process before left

    def write(self, **record: Any) -> None:
        """Append a record; it survives the process."""
        os.write(self._descriptor, (json.dumps(record, separators=(",", ":")) + "\n").encode())


def read(run_directory: str | os.PathLike[str], kind: str) -> list[dict[str, Any]]:
    """Every whole record of the processes whose name begins with ``kind``."""
    records: list[dict[str, Any]] = []
    for path in sorted((Path(run_directory) / "journal").glob(f"{kind}*.jsonl")):
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                if line.strip() and line.endswith(b"\n"):
                    records.append(json.loads(line))
            except ValueError:
                continue  # a line cut off by a crash; the next process appended to it
    return records
