"""Builds Go programs of this checkout for tests."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_PROGRAMS = {
    "plugintest": ("libs", "./plugin/plugintest"),
    "words": (".", "./examples/plugins/go/main.go"),
}


@functools.cache
def go_program(name: str) -> Path:
    """The path of a program, built once per process and by Go's cache."""
    folder, package = _PROGRAMS[name]
    made = Path(tempfile.mkdtemp(prefix="rollout-go-")) / name
    subprocess.run(["go", "build", "-o", str(made), package], cwd=_ROOT / folder, check=True)
    return made
