"""The NATS and registry of a real rolloutd, a small model of the addition example, and a run for
each test."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Iterator

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest

from rollout_testing.daemon import Daemon
from rollout_testing.run import Example, RunStreams
from rollout_workers.data.prompts import Text

_numbers = itertools.count()


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    started = Daemon(tmp_path_factory.mktemp("state")).start()
    yield started
    started.stop()


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Example:
    return Example.prepare(tmp_path_factory.mktemp("addition"))


@pytest.fixture(scope="session")
def text(example: Example) -> Text:
    return Text.load(str(example.model))


@pytest.fixture
def run() -> str:
    return f"run-inference-{next(_numbers)}"


@pytest.fixture
async def streams(daemon: Daemon, run: str) -> AsyncIterator[RunStreams]:
    opened = await RunStreams.open(daemon, run)
    yield opened
    await opened.close()
