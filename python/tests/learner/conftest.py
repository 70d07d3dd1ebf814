"""The registry of a real rolloutd, a small model, and batches in segment files in the format of the
buffer."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest

from rollout_testing.daemon import Daemon
from rollout_testing.run import Example

_numbers = itertools.count()


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    started = Daemon(tmp_path_factory.mktemp("state")).start()
    yield started
    started.stop()


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Example:
    return Example.prepare(tmp_path_factory.mktemp("addition"))


@pytest.fixture
def run() -> str:
    return f"run-learning-{next(_numbers)}"
