"""A worker is in the registry exactly while it runs."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rollout_testing.daemon import Daemon
from rollout_testing.services import passing, put
from rollout_testing.waiting import until
from rollout_workers.worker.credential import Token
from rollout_workers.worker.registration import TTL_SECONDS, Registration
from rollout_workers.worker.spec import Identity


def entries(daemon: Daemon, who: Identity) -> list[dict]:
    return [e for e in passing(daemon, who.service) if e["Meta"]["run"] == who.run]


async def test_registers_with_service_address_and_metadata(daemon: Daemon, who: Identity) -> None:
    registration = Registration(who, agent=daemon.consul, consul_token=Token(daemon.token), address="127.0.0.1:4711")
    registration.start()
    [entry] = entries(daemon, who)
    assert entry["ID"] == f"{who.run}/inference-0"
    assert (entry["Address"], entry["Port"]) == ("127.0.0.1", 4711)
    assert entry["Meta"] == {
        "run": who.run,
        "worker": "inference-0",
        "incarnation": "1",
        "process": who.process,
        "rank": "0",
        "proof": who.proof("127.0.0.1:4711"),
        "pid": str(os.getpid()),
    }
    registration.stop()
    assert entries(daemon, who) == []


def test_proof_matches_the_golden_vectors() -> None:
    """Go computes the same proofs (libs/worker)."""
    golden = Path(__file__).parents[3] / "schemas" / "golden" / "worker_proof.json"
    cases = json.loads(golden.read_text())["cases"]
    assert cases
    for case in cases:
        who = Identity("run-1", case["worker"], "inference", 1, rank=case["rank"], nonce=case["nonce"])
        assert who.proof(case["address"]) == case["proof"]


async def test_the_nonce_is_neither_registered_nor_printed(daemon: Daemon, who: Identity) -> None:
    who = replace(who, nonce="K7ZQ4N2M5XW3J6HBTDVC5RLYPA")
    registration = Registration(who, agent=daemon.consul, consul_token=Token(daemon.token), address="127.0.0.1:4711")
    registration.start()
    [entry] = entries(daemon, who)
    assert entry["Meta"]["proof"] == who.proof("127.0.0.1:4711")
    assert who.nonce not in json.dumps(entry) + repr(who)
    registration.stop()


async def test_registers_again_after_the_agent_lost_the_entry(
    daemon: Daemon, who: Identity, caplog: pytest.LogCaptureFixture
) -> None:
    registration = Registration(who, agent=daemon.consul, consul_token=Token(daemon.token), address="127.0.0.1:4711")
    registration.start()
    put(daemon, f"/v1/agent/service/deregister/{who.registration}")
    await until(lambda: "does not know this worker" in caplog.text)
    await until(lambda: entries(daemon, who))
    registration.stop()


def test_the_check_passes_while_the_main_thread_computes(daemon: Daemon, who: Identity) -> None:
    registration = Registration(who, agent=daemon.consul, consul_token=Token(daemon.token), address="127.0.0.1:4711")
    registration.start()
    end = time.monotonic() + TTL_SECONDS + 0.5
    while time.monotonic() < end:
        sum(range(10_000))
    assert len(entries(daemon, who)) == 1
    registration.stop()


async def test_an_unreachable_agent_is_not_an_error(who: Identity) -> None:
    registration = Registration(who, agent="127.0.0.1:1", address="127.0.0.1:4711")
    registration.start()
    registration.stop()


async def test_reports_a_newer_incarnation_of_the_learner(daemon: Daemon, who: Identity) -> None:
    superseded_by: list[int] = []
    registration = Registration(
        who, agent=daemon.consul, consul_token=Token(daemon.token), address="127.0.0.1:1", superseded=superseded_by.append
    )
    registration.start()
    newer = Registration(
        Identity(who.run, "learner-0", "learner", 2), agent=daemon.consul, consul_token=Token(daemon.token), address="127.0.0.1:2"
    )
    newer.start()
    await until(lambda: superseded_by)
    assert superseded_by == [2]
    newer.stop()
    registration.stop()
