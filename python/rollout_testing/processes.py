"""Finds processes in /proc."""

from __future__ import annotations

import contextlib
from pathlib import Path


def children(pid: int, named: str = "") -> list[int]:
    """The processes below one, at any depth, whose command line contains ``named``."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    below: set[int] = {pid}
    while more := {child for child, parent in parents.items() if parent in below} - below:
        below |= more
    return sorted(child for child in below - {pid} if named.encode() in _command(child))


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
