from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

os.environ.setdefault("MKL_CBWR", "AUTO")  # as workers do, before MKL's first product

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "kernel"


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package's C as it is, compiled as the environment does it."""
    folder = tmp_path_factory.mktemp("libraries")
    subprocess.run([SCRIPT, folder], check=True)
    return folder
