"""A worker is in the registry exactly while it lives."""

from __future__ import annotations

import os
import time

import pytest

from rollout_testing.daemon import Daemon
from rollout_testing.services import passing, put
from rollout_testing.waiting import until
from rollout_workers.worker.registration import TTL_SECONDS, Registration
from rollout_workers.worker.spec import Identity


def entries(daemon: Daemon, who: Identity) -> list[dict]:
    return [e for e in passing(daemon, who.service) if e["Meta"]["run"] == who.run]


async def test_registers_with_everything_that_others_look_for(daemon: Daemon, who: Identity) -> None:
    registration = Registration(who, agent=daemon.consul, consul_token=daemon.token, address="127.0.0.1:4711")
    registration.start()
    [entry] = entries(daemon, who)
    assert entry["ID"] == f"{who.run}/inference-0"
    assert (entry["Address"], entry["Port"]) == ("127.0.0.1", 4711)
    assert entry["Meta"] == {
        "run": who.run,
        "worker": "inference-0",
        "incarnation": "1",
        "process": who.process,
        "pid": str(os.getpid()),
    }
    registration.stop()
    assert entries(daemon, who) == []


async def test_registers_again_when_the_agent_forgot(daemon: Daemon, who: Identity, caplog: pytest.LogCaptureFixture) -> None:
    registration = Registration(who, agent=daemon.consul, consul_token=daemon.token, address="127.0.0.1:4711")
    registration.start()
    put(daemon, f"/v1/agent/service/deregister/{who.registration}")
    await until(lambda: "has forgotten this worker" in caplog.text)
    await until(lambda: entries(daemon, who))
    registration.stop()


def test_stays_passing_while_the_main_thread_computes(daemon: Daemon, who: Identity) -> None:
    registration = Registration(who, agent=daemon.consul, consul_token=daemon.token, address="127.0.0.1:4711")
    registration.start()
    end = time.monotonic() + TTL_SECONDS + 0.5
    while time.monotonic() < end:
        sum(range(10_000))
    assert len(entries(daemon, who)) == 1
    registration.stop()


async def test_an_agent_that_is_away_is_no_error(who: Identity) -> None:
    registration = Registration(who, agent="127.0.0.1:1", address="127.0.0.1:4711")
    registration.start()
    registration.stop()


async def test_says_when_a_newer_incarnation_has_a_learner(daemon: Daemon, who: Identity) -> None:
    told: list[int] = []
    registration = Registration(
        who, agent=daemon.consul, consul_token=daemon.token, address="127.0.0.1:1", superseded=told.append
    )
    registration.start()
    newer = Registration(
        Identity(who.run, "learner-0", "learner", 2), agent=daemon.consul, consul_token=daemon.token, address="127.0.0.1:2"
    )
    newer.start()
    await until(lambda: told)
    assert told == [2]
    newer.stop()
    registration.stop()
