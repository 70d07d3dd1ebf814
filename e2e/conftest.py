"""The small job of the end-to-end tests: `job.toml` on the addition example's untrained model."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STEPS, GROUPS, SAMPLES = 6, 8, 4


@pytest.fixture(scope="session")
def config() -> Path:
    subprocess.run([sys.executable, str(ROOT / "examples" / "addition" / "prepare.py")], check=True)
    return ROOT / "e2e" / "job.toml"
