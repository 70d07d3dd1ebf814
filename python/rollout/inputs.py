"""The layout of a folder of inputs: what the planner made or downloaded for a plan (docs/wire.md).

    inputs/rows/blake3-<hex>.jsonl             rows, by their digest
    inputs/models/<org>--<name>/<commit>/      a model of the hub

``libs/plan`` is the same code in Go.
"""

from __future__ import annotations

import os

FOLDER = "inputs"
"""Name of the folder in the folder of a run, and in that of the planner."""


def rows(folder: str, digest: str) -> str:
    """The file of rows with a digest."""
    return os.path.join(folder, "rows", digest + ".jsonl")


def model(folder: str, name: str, commit: str) -> str:
    """The folder of a model. name: as in the configuration, ``org/name`` or
    ``org/name@revision``."""
    return os.path.join(folder, "models", name.partition("@")[0].replace("/", "--"), commit)
