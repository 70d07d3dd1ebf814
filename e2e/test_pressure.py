"""A full disk, and several runs with the same services; without a model."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from mesh import Mesh, until
from sim import Job, audited, finish, journals_agree, sim_mesh, stop, submit

from rollout.event.v1 import event_pb2
from rollout.run.v1 import run_pb2
from rollout.storage.v1 import storage_pb2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The state folder of services whose segments are on a file system of 8 MiB."""
    segments = tmp_path / "state" / "segments"
    segments.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(segments)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"can't mount a tmpfs: {mounted.stderr.strip()}")
    yield tmp_path / "state"
    subprocess.run(["umount", "-l", str(segments)], check=True)


def test_a_full_disk_pauses_a_run_until_there_is_space(small_disk: Path, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", steps=12)
    running = sim_mesh(small_disk, seconds=0.1)
    try:
        running.start()
        run = submit(running, running.plan(job.write()), job)
        running.until_step(run, 2)
        ballast = small_disk / "segments" / "ballast"
        free = os.statvfs(ballast.parent)
        ballast.write_bytes(bytes(free.f_bavail * free.f_frsize - (400 << 10)))  # the reserve is a tenth of 8 MiB
        paused = next(s for s in running.watch(run) if s.run.state == run_pb2.RUN_STATE_PAUSED)
        assert paused.run.reason == "DISK_FULL" and "reserve" in paused.waiting_for, paused
        ballast.unlink()
        finish(running, run)
        audited(running, run)
        journals_agree(running, run, job)
    finally:
        stop(running)


def test_two_runs_make_steps_at_similar_rates(tmp_path: Path) -> None:
    """Of two runs with the same work, neither makes more than twice as many steps as the other
    between a pause of both and the end of the first one. The order of the steps is that of their
    common log."""
    jobs = [Job(tmp_path / name, steps=60) for name in ("one", "other")]
    running = sim_mesh(tmp_path / "state", seconds=0.05)
    try:
        running.start()
        locks = [running.plan(job.write()) for job in jobs]
        runs = [submit(running, lock, job) for lock, job in zip(locks, jobs, strict=True)]
        for run in runs:  # time for the workers of the other run to start
            running.until_step(run, 1)
            running.scheduler.PauseRun(run_pb2.PauseRunRequest(run_id=run))
        before = {run: running.status(run).run.step for run in runs}
        for run in runs:
            running.scheduler.ResumeRun(run_pb2.ResumeRunRequest(run_id=run))
        for run in runs:
            finish(running, run)
            audited(running, run)
        until(lambda: len(committed(running)) == 120, "the events of all steps", 60)
        order = [event.run_id for event in committed(running) if event.step > before[event.run_id]]
    finally:
        stop(running)
    assert max(before.values()) < 30, f"the pause came after steps {before}, which is too late for a comparison"
    both = order[: min(len(order) - order[::-1].index(run) for run in runs)]
    made = [both.count(run) for run in runs]
    assert 2 * min(made) >= max(made), f"the runs made {made} steps in the same time"


def committed(running: Mesh) -> list[event_pb2.Event]:
    """The steps of all runs in the order of their commits."""
    wanted = storage_pb2.EventFilter(kinds=["step.committed"])
    return list(running.events.ListEvents(storage_pb2.ListEventsRequest(filter=wanted)).events)
