from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rollout_workers.delivery.kernel import Kernel, library

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "kernel"


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    """``segments.c`` as it is, compiled as the environment does it."""
    folder = tmp_path_factory.mktemp("kernel")
    subprocess.run([SCRIPT, folder], check=True)
    return Kernel(library(folder / "delivery"))
