"""The tokenizer of the addition example: one token a character."""

from __future__ import annotations

import runpy

import pytest

from rollout_workers.harness.prompts import Text
from rollout_workers.mesh.testing.run import EXAMPLE


@pytest.fixture(scope="session")
def text() -> Text:
    return Text(runpy.run_path(str(EXAMPLE / "prepare.py"))["build_tokenizer"]())
