from __future__ import annotations

from pathlib import Path

import pytest

from rollout_workers.compiled import library
from rollout_workers.weights.transfer.kernel import SOURCE, Kernel


@pytest.fixture(scope="session")
def compiled(libraries: Path) -> Kernel:
    """``segments.c`` as it is."""
    return Kernel(library(SOURCE, libraries / "weights/transfer"))
