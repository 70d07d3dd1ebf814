"""The embedded NATS and registry of a real rolloutd, which all tests share. Each test has its own
run."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator

import pytest

from rollout_testing.credential import worker_token
from rollout_testing.daemon import Daemon
from rollout_testing.run import RunStreams
from rollout_workers.worker.credential import Token
from rollout_workers.worker.heartbeat import Heartbeat
from rollout_workers.worker.spec import Identity

_numbers = itertools.count()


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    started = Daemon(tmp_path_factory.mktemp("state")).start()
    yield started
    started.stop()


@pytest.fixture
def who() -> Identity:
    return Identity(f"run-mesh-{next(_numbers)}", "inference-0", "inference", 1)


@pytest.fixture
async def streams(daemon: Daemon, who: Identity) -> AsyncIterator[RunStreams]:
    opened = await RunStreams.open(daemon, who.run)
    yield opened
    await opened.close()


@pytest.fixture
def heartbeat(daemon: Daemon, who: Identity) -> Iterator[Heartbeat]:
    token = Token(worker_token(daemon.token, who.run, who.kind))  # its permissions are those of a worker
    started = Heartbeat(daemon.nats_url, token, name=who.registration, run=who.run)
    started.start()
    yield started
    started.stop()
