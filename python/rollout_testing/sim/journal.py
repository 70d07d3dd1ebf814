"""A journal of the work of a process. Each process has a file with one JSON object per line, and
appends each line with one write."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "ROLLOUT_SIM_JOURNALS"
"""The folder of the journals of all runs, for a test in which the disk of the runs is full; a run's
own folder where it is not set."""


def folder_of(run_directory: str | os.PathLike[str], environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of a run's journals, for processes with these variables."""
    run = Path(run_directory)
    return Path(environ[FOLDER_VARIABLE]) / run.name if FOLDER_VARIABLE in environ else run / "journal"


class Journal:
    """``<name>.jsonl`` in the folder of the run's journals. An incomplete line, from a kill, is
    ignored."""

    def __init__(self, run_directory: str, name: str) -> None:
        folder = folder_of(run_directory)
        folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(folder / f"{name}.jsonl", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        os.write(self._descriptor, b"\n")  # end an incomplete line of the previous process

    def write(self, **record: Any) -> None:
        """Append a record. It survives the process."""
        os.write(self._descriptor, (json.dumps(record, separators=(",", ":")) + "\n").encode())


def read(run_directory: str | os.PathLike[str], kind: str, environ: Mapping[str, str] = os.environ) -> list[dict[str, Any]]:
    """Every complete record of the processes whose names start with ``kind``. environ: their
    variables."""
    records: list[dict[str, Any]] = []
    for path in sorted(folder_of(run_directory, environ).glob(f"{kind}*.jsonl")):
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                if line.strip() and line.endswith(b"\n"):
                    records.append(json.loads(line))
            except ValueError:
                continue  # a line that a crash truncated, after which the next process appended
    return records
