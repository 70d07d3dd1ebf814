"""`rollout explain` names the root cause of stalls that are planted in a running job, without a
model."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mesh import until
from planted import Stalled, crashing, explained, flag, frozen, job_of, stopped
from sim import Job, sim_mesh, stop, submit
from test_pressure import mounted

from rollout.run.v1 import run_pb2

_HANGS = """import pathlib
import socket
import time

HERE = pathlib.Path(__file__).parent


def letters(samples):
    while (HERE / "hang").exists():
        time.sleep(0.05)
    if (HERE / "judge").exists():
        with socket.create_connection(("127.0.0.1", int((HERE / "judge").read_text()))) as judge:
            judge.recv(1)
    return [1.0 for _ in samples]
"""


@contextlib.contextmanager
def _paused(stalled: Stalled) -> Iterator[None]:
    stalled.running.scheduler.PauseRun(run_pb2.PauseRunRequest(run_id=stalled.run))
    try:
        yield
    finally:
        stalled.running.scheduler.ResumeRun(run_pb2.ResumeRunRequest(run_id=stalled.run))


@contextlib.contextmanager
def _judged(stalled: Stalled) -> Iterator[None]:
    """The judge accepts connections and never answers, until it is gone."""
    with socket.create_server(("127.0.0.1", 0)) as judge, flag(stalled.folder / "judge", str(judge.getsockname()[1])):
        yield


@dataclass(frozen=True)
class Stall:
    """plant: a context in which the run stalls. reason: of the root. words: in its evidence. fix:
    a word of the fix."""

    name: str
    plant: Callable[[Stalled], contextlib.AbstractContextManager[None]]
    reason: str
    words: tuple[str, ...]
    fix: str


STALLS = [
    Stall(
        "a reward hangs",
        lambda s: flag(s.folder / "hang"),
        "REWARD_CALL",
        ("reward.py:letters", "of 40 s"),
        "correct reward.py:10",
    ),
    Stall(
        "the inference worker is stopped",
        lambda s: stopped(s, "inference-0"),
        "WORKER_STOPPED",
        ("inference-0",),
        "kill -CONT",
    ),
    Stall("the learner is stopped", lambda s: stopped(s, "learner-0"), "WORKER_STOPPED", ("learner-0",), "kill -CONT"),
    Stall("a judge does not answer", lambda s: _judged(s), "REWARD_CALL", ("reward.py:letters", "of 40 s"), "does not answer"),
    Stall(
        "all engines crash",
        lambda s: crashing(s, "inference"),
        "WORKER_OUTPUT",
        ("inference-0",),
        "rollout logs worker",
    ),
    Stall("the run is paused", _paused, "PAUSED", ("paused by request",), "rollout runs resume"),
]


def _hanging(config: Path) -> None:
    """A reward with a deadline that hangs when a test wants it."""
    config.with_name("reward.py").write_text(_HANGS)
    config.write_text(config.read_text().replace("retries = 0", "retries = 0\ntimeout_seconds = 40"))


@pytest.fixture(scope="module")
def stalled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stalled]:
    folder = tmp_path_factory.mktemp("explain")
    with job_of(Job(folder / "job", steps=100_000, workers=1, snapshot=1000), folder / "state", edit=_hanging) as running:
        yield running


@pytest.mark.parametrize("stall", STALLS, ids=[stall.name for stall in STALLS])
def test_explain_names_the_root_of_a_stall(stalled: Stalled, stall: Stall) -> None:
    with stall.plant(stalled):
        found: dict[str, Any] = {}

        def named() -> bool:
            found.update(explained(stalled.running, stalled.run))
            return bool(found.get("chain")) and found["chain"][-1]["reason"] == stall.reason

        with contextlib.suppress(AssertionError):
            until(named, stall.name, 30)
        root = found["chain"][-1]
        assert root["reason"] == stall.reason, found["chain"]
        assert all(word in root["evidence"] for word in stall.words), root
        assert stall.fix in [wait["fix"] for wait in found["chain"] if wait["fix"]][-1], found["chain"]
    step = stalled.running.status(stalled.run).run.step
    until(lambda: stalled.running.status(stalled.run).run.step > step, "the run to continue", 60)


def test_explain_reads_the_state_of_a_dead_control_plane(stalled: Stalled) -> None:
    stalled.running.kill("all")
    time.sleep(0.2)  # the workers exit
    found = explained(stalled.running, stalled.run)
    assert [wait["reason"] for wait in found["chain"]][:2] == ["INTERRUPTED", "NO_CONTROL_PLANE"], found
    assert "rollout run --resume" in found["chain"][1]["fix"] and found["events"], found


@pytest.fixture(scope="module")
def seven(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stalled]:
    folder = tmp_path_factory.mktemp("seven")
    with job_of(Job(folder / "job", steps=100_000, workers=1, snapshot=10), folder / "state", "seven", edit=_hanging) as running:
        yield running


@pytest.mark.parametrize(
    ("service", "hangs", "root", "word"),
    [
        ("buffer", False, "SERVICE_STOPPED", "buffer"),
        ("learner-controller", False, "SERVICE_STOPPED", "learner-controller"),
        ("storage", True, "REWARD_CALL", "reward.py"),
        ("storage", False, "SERVICE_STOPPED", "storage"),  # the snapshot service waits for it
        ("snapshot", False, "SERVICE_STOPPED", "snapshot"),
    ],
)
def test_explain_works_without_a_service(seven: Stalled, service: str, hangs: bool, root: str, word: str) -> None:
    """The rest is explained, and the service is listed, once, with its stopped process. Without
    storage the events are missing; a reward that hangs is named."""
    with flag(seven.folder / "hang") if hangs else contextlib.nullcontext(), frozen(seven.running, service):
        found: dict[str, Any] = {}

        def named() -> bool:
            found.update(explained(seven.running, seven.run))
            silent = any(u["name"] == service for u in found.get("unanswered", ()))
            return silent and found["chain"][-1]["reason"] == root

        with contextlib.suppress(AssertionError):
            until(named, f"the explanation without {service}", 60)
        assert found["chain"][-1]["reason"] == root and word in found["chain"][-1]["evidence"], found["chain"]
        assert [u["name"] for u in found["unanswered"]].count(service) == 1, found["unanswered"]
        if not hangs:
            assert "kill -CONT" in found["chain"][-1]["fix"], found["chain"]
    step = seven.running.status(seven.run).run.step
    until(lambda: seven.running.status(seven.run).run.step > step, "the run to continue", 60)


def test_explain_names_missing_agents_and_why_a_run_ended(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", agents=True, workers=1)
    running = sim_mesh(tmp_path / "state")
    running.start()
    try:
        run = submit(running, running.plan(job.write()), job)
        found: dict[str, Any] = {}

        def named() -> bool:
            found.update(explained(running, run))
            return found["chain"][-1]["reason"] == "NO_AGENT"

        with contextlib.suppress(AssertionError):
            until(named, "the wait for agents", 60)
        root = found["chain"][-1]
        assert root["reason"] == "NO_AGENT" and "start an agent that takes prompts from http://" in root["fix"], found["chain"]
        running.scheduler.CancelRun(run_pb2.CancelRunRequest(run_id=run))
        until(lambda: explained(running, run)["state"] == "CANCELLED", "the end of the run", 30)
        [ended] = explained(running, run)["chain"]
        assert ended["reason"] == "CANCELLED" and f"rollout run --resume {run}" in ended["fix"], ended
    finally:
        stop(running)


def test_explain_names_a_full_disk(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", steps=100_000, workers=1, snapshot=1000)
    with mounted(tmp_path / "state" / "segments", "8m") as disk, job_of(job, tmp_path / "state") as stalled:
        disk.fill(leave=400 << 10)
        root = stalled.root(lambda wait: wait["reason"] == "DISK_FULL", "the wait for space")
        assert root["owner"] == "user" and "segments" in root["evidence"] and root["fix"], root
        disk.empty()
        stalled.continues()


def test_explain_names_paused_nats(tmp_path: Path) -> None:
    """NATS and the registry are in a process that is stopped."""
    job = Job(tmp_path / "job", steps=100_000, workers=1, snapshot=1000)
    with job_of(job, tmp_path / "state", "seven") as stalled:
        with frozen(stalled.running, "servers"):
            root = stalled.root(lambda wait: wait["owner"] == "nats", "the wait for NATS", 60)
            fixes = ("rollout doctor", "kill -CONT")  # the latter where the stopped process was found
            assert root["reason"] in ("NO_ANSWER", "PUBLISH") and any(fix in root["fix"] for fix in fixes), root
        stalled.continues()
