"""A scheduler that takes over continues with the workers of the one that was killed: no worker is
restarted, no step is made twice. If none takes over, nothing is left."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from conftest import GROUPS, SAMPLES
from mesh import Mesh, assert_consumed_once, mesh, until
from sim import Job, audited, sim_mesh, submit
from test_kills import alive

from rollout.event.v1 import event_pb2
from rollout.run.v1 import run_pb2
from rollout.storage.v1 import storage_pb2
from rollout_testing.sim import journal

STEPS = 16
CONFIG = (f"train.steps={STEPS}", "snapshot.every_steps=10", "eval.every_steps=0")
RESUMING = ("--worker-resume-on-start",)
PACE = 0.2
"""The longest duration of a sample of the simulated workers in seconds."""


def pids(status: run_pb2.RunStatus) -> dict[str, int]:
    return {worker.worker_id: worker.pid for worker in status.workers}


def events(running: Mesh, run: str, kind: str) -> list[event_pb2.Event]:
    chosen = storage_pb2.EventFilter(run_id=run, kinds=[kind])
    return list(running.events.ListEvents(storage_pb2.ListEventsRequest(filter=chosen)).events)


@pytest.mark.slow
@pytest.mark.timeout(600)  # the workers of two runs with torch
def test_a_torch_run_continues_under_the_next_scheduler(config: Path, tmp_path: Path) -> None:
    with mesh(tmp_path / "reference") as running:
        run = running.submit(config, *CONFIG)
        running.finish(run)
        reference = assert_consumed_once(running, run, steps=STEPS, groups_per_step=GROUPS, group_size=SAMPLES)
    running = Mesh(tmp_path / "killed", "seven", arguments=RESUMING)
    try:
        running.start()
        run = running.submit(config, *CONFIG)
        before = pids(running.until_step(run, 3))
        running.kill("scheduler")
        running.start_service("scheduler")
        after = running.until_step(run, 9)
        assert pids(after) == before
        running.kill("scheduler")
        running.kill("learner-controller")
        running.start_service("scheduler")
        running.start_service("learner-controller")
        assert pids(running.until_step(run, 13)) == before
        last = running.finish(run)
        digest = assert_consumed_once(running, run, steps=STEPS, groups_per_step=GROUPS, group_size=SAMPLES)
        assert digest == reference
        assert last.incarnation == 1
        made = Counter(event.step for event in events(running, run, "step.committed"))
        assert made == Counter(range(1, STEPS + 1)), "a step was made twice"
        assert len(events(running, run, "worker.started")) == len(before)
        assert len(events(running, run, "worker.adopted")) == 2 * len(before)
        until(lambda: not any(map(alive, before.values())), "the workers to exit", 30)
        running.stop()
    finally:
        end(running)


def test_a_daemon_that_hosts_everything_adopts_its_workers(tmp_path: Path) -> None:
    """Its workers lose NATS and the registry too."""
    job = Job(tmp_path / "job", steps=12)
    running = sim_mesh(tmp_path / "state", "all", PACE, RESUMING)
    try:
        running.start()
        run = submit(running, running.plan(job.write()), job)
        before = running.until_step(run, 3)
        running.kill("all")
        running.start_service("all")
        last = running.finish(run)
        assert made(before) == list(range(1, 13))
        assert last.incarnation == 1
        assert len(events(running, run, "worker.started")) == len(before.workers)
        assert audited(running, run)["whole"]
        running.stop()
    finally:
        end(running)


@pytest.mark.parametrize("drain", [False, True], ids=["stopped", "drained"])
def test_a_cancel_during_the_takeover_leaves_no_worker(drain: bool, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", steps=1000)
    running = sim_mesh(tmp_path / "state", "seven", PACE, RESUMING)
    try:
        running.start()
        run = submit(running, running.plan(job.write()), job)
        workers = pids(running.until_step(run, 2)).values()
        running.kill("scheduler")
        running.start_service("scheduler")
        running.scheduler.CancelRun(run_pb2.CancelRunRequest(run_id=run, drain=drain))
        until(lambda: running.status(run).run.state == run_pb2.RUN_STATE_CANCELLED, "the end of the run", 60)
        until(lambda: not any(map(alive, workers)), "the workers to exit", 10)
        assert audited(running, run)["whole"]
        running.stop()
    finally:
        end(running)


def test_a_run_that_ends_without_a_scheduler_is_recorded_by_the_next_one(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", steps=4)
    running = sim_mesh(tmp_path / "state", "seven", PACE, RESUMING)
    try:
        running.start()
        run = submit(running, running.plan(job.write()), job)
        before = running.until_step(run, 3)
        running.kill("scheduler")
        until(lambda: max(made(before)) == 4, "the last step", 60)
        running.start_service("scheduler")
        assert running.finish(run).step == 4
        assert made(before) == [1, 2, 3, 4]
        until(lambda: not any(map(alive, pids(before).values())), "the workers to exit", 10)
        running.stop()
    finally:
        end(running)


def made(status: run_pb2.RunStatus) -> list[int]:
    """The steps that the learner has made, in order."""
    return [record["step"] for record in journal.read(Path(status.run.directory), "learner")]


@pytest.mark.slow  # a worker without a scheduler is kept for 30 s
def test_nothing_is_left_if_no_scheduler_takes_over(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", steps=1000)
    running = sim_mesh(tmp_path / "state", "seven", PACE, RESUMING)
    try:
        running.start()
        run = submit(running, running.plan(job.write()), job)
        workers = pids(running.until_step(run, 2)).values()
        keepers = {parent(pid) for pid in workers}
        running.kill("scheduler")
        assert all(map(alive, workers))
        until(lambda: not any(map(alive, [*workers, *keepers])), "the workers and their keeper to exit", 60)
    finally:
        end(running)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def end(running: Mesh) -> None:
    for process in running.processes.values():
        if process.poll() is None:
            process.kill()
