"""`rollout explain` names the root cause of stalls that are planted in a running job, without a
model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mesh import ROOT, Mesh, until
from sim import Job, sim_mesh, stop, submit

from rollout.run.v1 import run_pb2

_HANGS = """import pathlib
import time

HERE = pathlib.Path(__file__).parent


def letters(samples):
    while (HERE / "hang").exists():
        time.sleep(0.05)
    return [1.0 for _ in samples]
"""


def explained(running: Mesh, run: str, *arguments: str) -> dict[str, Any]:
    """The explanation as JSON."""
    command = [str(ROOT / "bin" / "rollout"), "--format", "json", "explain", run, *arguments]
    if running.shape == "all":
        command += ["--state-dir", str(running.state)]
    else:
        daemon = running.daemon()
        command += ["--consul", str(daemon["consul"]), "--token-file", str(daemon["token_file"])]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert outcome.returncode == 0, f"{outcome.returncode}: {outcome.stdout[-3000:]}{outcome.stderr[-3000:]}"
    return json.loads(outcome.stdout)


@dataclass(frozen=True)
class Stalled:
    """A running job."""

    running: Mesh
    run: str
    folder: Path

    def worker(self, name: str) -> run_pb2.Worker:
        return next(w for w in self.running.status(self.run).workers if w.worker_id == name)


@contextlib.contextmanager
def _flag(path: Path) -> Iterator[None]:
    path.touch()
    try:
        yield
    finally:
        path.unlink()


@contextlib.contextmanager
def _stopped(stalled: Stalled, *workers: str) -> Iterator[None]:
    pids = [stalled.worker(name).pid for name in workers]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def _paused(stalled: Stalled) -> Iterator[None]:
    stalled.running.scheduler.PauseRun(run_pb2.PauseRunRequest(run_id=stalled.run))
    try:
        yield
    finally:
        stalled.running.scheduler.ResumeRun(run_pb2.ResumeRunRequest(run_id=stalled.run))


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
    Stall("a reward hangs", lambda s: _flag(s.folder / "hang"), "REWARD_CALL", ("reward.py:letters", "of 40 s"), "plugin test"),
    Stall(
        "the inference worker is stopped",
        lambda s: _stopped(s, "inference-0"),
        "WORKER_STOPPED",
        ("inference-0",),
        "kill -CONT",
    ),
    Stall("the learner is stopped", lambda s: _stopped(s, "learner-0"), "WORKER_STOPPED", ("learner-0",), "kill -CONT"),
    Stall("the run is paused", _paused, "PAUSED", ("paused by request",), "rollout runs resume"),
]


@pytest.fixture(scope="module")
def stalled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stalled]:
    folder = tmp_path_factory.mktemp("explain")
    job = Job(folder / "job", steps=100_000, workers=1, snapshot=1000)
    config = job.write()
    (job.folder / "reward.py").write_text(_HANGS)
    config.write_text(config.read_text().replace("retries = 0", "retries = 0\ntimeout_seconds = 40"))
    running = sim_mesh(folder / "state", seconds=0.02)
    running.start()
    try:
        run = submit(running, running.plan(config), job)
        running.until_step(run, 1)
        yield Stalled(running, run, job.folder)
    finally:
        stop(running)


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
        assert stall.fix in root["fix"], root
    step = stalled.running.status(stalled.run).run.step
    until(lambda: stalled.running.status(stalled.run).run.step > step, "the run to continue", 60)


def test_explain_reads_the_state_of_a_dead_control_plane(stalled: Stalled) -> None:
    stalled.running.kill("all")
    time.sleep(0.2)  # the workers exit
    found = explained(stalled.running, stalled.run)
    assert [wait["reason"] for wait in found["chain"]][:2] == ["INTERRUPTED", "NO_CONTROL_PLANE"], found
    assert "rollout run --resume" in found["chain"][1]["fix"] and found["events"], found


@contextlib.contextmanager
def _frozen(running: Mesh, name: str) -> Iterator[None]:
    running.processes[name].send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        running.processes[name].send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def seven(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stalled]:
    folder = tmp_path_factory.mktemp("seven")
    job = Job(folder / "job", steps=100_000, workers=1, snapshot=1000)
    config = job.write()
    (job.folder / "reward.py").write_text(_HANGS)
    running = sim_mesh(folder / "state", "seven", seconds=0.02)
    running.start()
    try:
        run = submit(running, running.plan(config), job)
        running.until_step(run, 1)
        yield Stalled(running, run, job.folder)
    finally:
        stop(running)


@pytest.mark.parametrize(
    ("service", "root", "word"),
    [
        ("buffer", "NO_ANSWER", "buffer"),
        ("learner-controller", "NO_ANSWER", "learner-controller"),
        ("storage", "REWARD_CALL", "reward.py"),
    ],
)
def test_explain_works_without_a_service(seven: Stalled, service: str, root: str, word: str) -> None:
    """The rest is explained, and the service is listed. Without storage the events are missing; the
    reward that hangs is named."""
    hangs = _flag(seven.folder / "hang") if service == "storage" else contextlib.nullcontext()
    with hangs, _frozen(seven.running, service):
        found: dict[str, Any] = {}

        def named() -> bool:
            found.update(explained(seven.running, seven.run))
            silent = any(u["name"] == service for u in found.get("unanswered", ()))
            return silent and found["chain"][-1]["reason"] == root

        with contextlib.suppress(AssertionError):
            until(named, f"the explanation without {service}", 60)
        assert found["chain"][-1]["reason"] == root and word in found["chain"][-1]["evidence"], found["chain"]
        assert service in [u["name"] for u in found["unanswered"]], found["unanswered"]
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
