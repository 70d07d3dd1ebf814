"""Stores the output of a bench in `.cache/bench/`: the printed lines as text, and the figures as
JSON."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

FOLDER = Path(__file__).resolve().parent.parent / ".cache" / "bench"


class _Twice(io.TextIOBase):
    """Writes to two streams."""

    def __init__(self, one: TextIO, other: TextIO) -> None:
        self._places = (one, other)

    def write(self, text: str) -> int:
        for place in self._places:
            place.write(text)
        return len(text)

    def flush(self) -> None:
        for place in self._places:
            place.flush()


@contextlib.contextmanager
def recorded(name: str) -> Iterator[dict[str, Any]]:
    """Copy everything that is printed inside of the block to ``NAME.txt``. Write the dict to
    ``NAME.json``, with the load of the machine before and after, which shows whether it was idle.
    Both files are also written after an exception."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {}
    began, before = time.time(), os.getloadavg()[0]
    with (FOLDER / f"{name}.txt").open("w") as text:
        try:
            with contextlib.redirect_stdout(_Twice(sys.stdout, text)):
                yield figures
        finally:
            record = {
                "arguments": sys.argv[1:],
                "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
                "minutes": round((time.time() - began) / 60, 2),
                "processors": os.cpu_count(),
                "load": [round(before, 2), round(os.getloadavg()[0], 2)],
                **figures,
            }
            (FOLDER / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
            where = os.path.relpath(FOLDER / name)
            print(f"{record['minutes']} minutes, load {record['load'][0]} before; stored in {where}.txt and .json", flush=True)
