"""Shared fixtures of the weights tests."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

PREPARE = Path(__file__).parents[3] / "examples" / "addition" / "prepare.py"


@pytest.fixture(scope="session")
def addition_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small decoder with the tokenizer of the addition example."""
    folder = tmp_path_factory.mktemp("addition") / "model"
    runpy.run_path(str(PREPARE))["write_model"](folder, layers=1, hidden=16)
    return folder
