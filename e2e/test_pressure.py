"""A full disk, and several runs with the same services; without a model."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from mesh import ENDED, Mesh, describe, until
from sim import UNAVAILABLE, Job, audited, finish, journals_agree, sim_mesh, stop, submit

from rollout.event.v1 import event_pb2
from rollout.run.v1 import run_pb2
from rollout.storage.v1 import storage_pb2

RESERVE = 10  # a tenth of the disk stays free


@dataclass
class SmallDisk:
    """A file system that tests fill."""

    path: Path

    @property
    def free(self) -> int:
        space = os.statvfs(self.path)
        return space.f_bavail * space.f_frsize

    @property
    def _ballast(self) -> Path:
        return self.path / "ballast"

    def fill(self, leave: int = 0) -> None:
        """Write a file, as another program would, until so many bytes are free."""
        with self._ballast.open("ab", buffering=0) as file:
            try:
                while (more := self.free - leave) > 0:
                    file.write(bytes(min(more, 1 << 20)))
            except OSError as error:
                assert error.errno == errno.ENOSPC and not leave, error

    def empty(self) -> None:
        """Remove that file."""
        self._ballast.unlink()

    def grow(self, size: str) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(self.path)], check=True)


@contextlib.contextmanager
def mounted(path: Path, size: str) -> Iterator[SmallDisk]:
    path.mkdir(parents=True)
    outcome = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True, text=True)
    if outcome.returncode:
        pytest.skip(f"can't mount a tmpfs: {outcome.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def full(status: run_pb2.RunStatus) -> bool:
    """Whether a status says that the run waits for space, who can help, and how."""
    waits = [wait for wait in status.waits if wait.reason == "DISK_FULL"]
    assert all(wait.owner == "user" and wait.fix and wait.evidence and wait.since.seconds for wait in waits), waits
    return bool(waits)


def until_full(running: Mesh, run: str) -> run_pb2.RunStatus:
    """The status when the run waits for space."""
    until(lambda: full(running.status(run)), "the run to wait for space", 30)
    return running.status(run)


def test_a_full_disk_pauses_a_run_until_there_is_space(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", steps=12)
    with mounted(tmp_path / "state" / "segments", "8m") as disk:
        running = sim_mesh(tmp_path / "state", seconds=0.1)
        try:
            running.start()
            run = submit(running, running.plan(job.write()), job)
            running.until_step(run, 2)
            disk.fill(leave=400 << 10)
            paused = next(s for s in running.watch(run) if s.run.state == run_pb2.RUN_STATE_PAUSED)
            assert paused.run.reason == "DISK_FULL" and "reserve" in paused.waiting_for and full(paused), paused
            disk.empty()
            finish(running, run)
            audited(running, run)
            journals_agree(running, run, job)
        finally:
            stop(running)


def test_another_program_fills_the_disk_again_and_again(tmp_path: Path) -> None:
    """0 bytes are free in whichever phase the run is. It waits, continues by itself, and makes the
    same weights as a run that nothing disturbs."""
    undisturbed, job = (Job(tmp_path / name, steps=16, snapshot=2) for name in ("undisturbed", "job"))
    with mounted(tmp_path / "state", "64m") as disk:
        running = sim_mesh(disk.path, seconds=0.05, ROLLOUT_SIM_JOURNALS=str(tmp_path / "journals"))
        try:
            running.start()
            first = submit(running, running.plan(undisturbed.write()), undisturbed)
            finish(running, first)
            run = submit(running, running.plan(job.write()), job)
            for step in (1, 2, 4, 7):
                running.until_step(run, step)
                disk.fill()
                status = until_full(running, run)
                assert status.run.state not in ENDED, describe(status)
                disk.empty()
            finish(running, run)
            assert running.status(run).run.weights_digest == running.status(first).run.weights_digest
            audited(running, run)
            journals_agree(running, run, job)
        finally:
            stop(running)


def test_snapshots_leave_the_reserve(tmp_path: Path) -> None:
    """A run waits before a snapshot that would use the reserve, and continues on a larger disk."""
    size, snapshot = 64 << 20, 20 << 20
    job = Job(tmp_path / "job", steps=6, snapshot=1)
    with mounted(tmp_path / "state", str(size)) as disk:
        running = sim_mesh(disk.path, ROLLOUT_SIM_STATE_BYTES=str(snapshot))
        try:
            running.start()
            run = submit(running, running.plan(job.write()), job)
            paused = next(s for s in running.watch(run) if s.run.state == run_pb2.RUN_STATE_PAUSED)
            assert full(paused) and "snapshot" in paused.waiting_for and 1 <= paused.run.step < 6, paused
            assert disk.free > size // RESERVE
            disk.grow("160m")
            finish(running, run)
            audited(running, run)
        finally:
            stop(running)
        assert "no space left" not in (disk.path / "all.log").read_text()


@pytest.mark.parametrize("drain", [False, True])
def test_a_run_is_cancelled_on_a_full_disk(tmp_path: Path, drain: bool) -> None:
    """Nothing is recorded before there is space, but the workers stop, and nothing fails."""
    job = Job(tmp_path / "job", steps=200)
    with mounted(tmp_path / "state", "64m") as disk:
        running = sim_mesh(disk.path, seconds=0.05, ROLLOUT_SIM_JOURNALS=str(tmp_path / "journals"))
        try:
            running.start()
            run = submit(running, running.plan(job.write()), job)
            pids = [worker.pid for worker in running.until_step(run, 2).workers]
            disk.fill()
            until_full(running, run)
            running.scheduler.CancelRun(run_pb2.CancelRunRequest(run_id=run, drain=drain))
            until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the workers to stop", 20)
            disk.empty()
            ended = list(running.watch(run))[-1]
            assert ended.run.state == run_pb2.RUN_STATE_CANCELLED, describe(ended)
            short = Job(tmp_path / "short", steps=2)
            finish(running, submit(running, running.plan(short.write()), short))
        finally:
            stop(running)


def test_runs_and_daemons_are_not_started_on_a_full_disk(tmp_path: Path) -> None:
    """They are refused with a reason and a fix, and start when there is space."""
    job = Job(tmp_path / "job", steps=2)
    with mounted(tmp_path / "state", "64m") as disk:
        running = sim_mesh(disk.path)
        try:
            running.start()
            lock = running.plan(job.write())
            disk.fill()
            with pytest.raises(grpc.RpcError) as refused:
                for _ in range(2000):  # a database may have space in its own files for some
                    submit(running, lock, job)
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "disk is full" in (refused.value.details() or "")
            disk.empty()
            finish(running, submit(running, lock, job))
            running.stop()
            disk.fill()
            running.launch("all")
            code = running.processes["all"].wait(60)
            assert code in (0, UNAVAILABLE), running.log("all")
        finally:
            disk.empty()
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
