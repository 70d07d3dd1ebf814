"""A real NATS server, which the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollout_testing.daemon import Daemon


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    started = Daemon(tmp_path_factory.mktemp("state")).start()
    yield started
    started.stop()
