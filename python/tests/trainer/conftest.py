"""Shared fixture of the trainer's tests: a model of 30,000 parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from .addition import prepare_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a two-layer decoder with random weights."""
    return prepare_model(tmp_path_factory.mktemp("learner") / "model")
