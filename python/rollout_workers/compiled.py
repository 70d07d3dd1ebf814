"""Where ``scripts/kernel`` puts the libraries of the package's C."""

from __future__ import annotations

import hashlib
from pathlib import Path


def library(source: Path, folder: Path | None = None) -> Path:
    """The library of a C file as it is: named for the file's content, so that one made of other code is not loaded. folder: where
    it lies, if not beside its source."""
    return (folder or source.parent) / f"_{source.stem}-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}.so"
