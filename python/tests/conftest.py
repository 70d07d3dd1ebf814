from __future__ import annotations

import os
import runpy
import subprocess
from pathlib import Path

import pytest

from rollout_testing.run import EXAMPLE
from rollout_workers.data.prompts import Text
from rollout_workers.kernels.build import library
from rollout_workers.kernels.segments import CompiledSegments

os.environ.setdefault("MKL_CBWR", "AUTO")  # as workers do, before MKL's first product

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "kernel"


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the compiled kernels of this checkout."""
    folder = tmp_path_factory.mktemp("libraries")
    subprocess.run([SCRIPT, folder], check=True)
    return folder


@pytest.fixture(scope="session")
def compiled_segments(libraries: Path) -> CompiledSegments:
    """The compiled segment codec of this checkout."""
    return CompiledSegments(library("segments", libraries))


@pytest.fixture(scope="session")
def text() -> Text:
    """The tokenizer of the addition example: one token per character."""
    return Text(runpy.run_path(str(EXAMPLE / "prepare.py"))["build_tokenizer"]())
