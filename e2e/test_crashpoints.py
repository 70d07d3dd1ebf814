"""Exits at every named crash point. The process exits there and is restarted, and the run reaches
the same weights.

One run without a model visits all points, one after the other, with seven processes. Between two
points the run is paused, so that it does not end before the last point. The points are read from
the sources; a point that is missing here fails the test.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from mesh import ENDED, ROOT, Mesh, until
from sim import Job, audited, finish, journals_agree, sim_mesh, stop, submit

from rollout.run.v1 import run_pb2
from rollout.snapshot.v1 import snapshot_pb2
from rollout_testing.sim import crash

STEPS = 150
PROCESS = {"scheduler": "scheduler", "buffer": "buffer", "controller": "learner-controller", "snapshot": "snapshot"}

# Points that are reached once, at the start of the run. Each one starts where the previous one
# stopped.
FIRST = (
    "scheduler/created",
    "scheduler/resumed",
    "scheduler/streams",
    "scheduler/opened",
    "buffer/created",
    "buffer/recorded",
    "controller/recorded",
)
# Points that only a starting process reaches, so each follows another point of the same process.
AFTER_A_START = {
    "controller/loaded": "controller/stored",
    "learner/registered": "learner/saved",
    "learner/initialized": "learner/registered",
}
AFTER_A_START |= {"inference/registered": "inference/swapped"}
CUTS = ("snapshot/captured", "scheduler/pinned", "buffer/seeding")
DELETION = ("scheduler/deleting", "buffer/emptied", "scheduler/deleted")
LAST = ("controller/finished", "scheduler/closed", "scheduler/ended", "controller/reported")


def points() -> list[str]:
    """Every point, in the order of the walk."""
    found = {
        name
        for path in (ROOT / "services").rglob("*.go")
        for name in re.findall(r'crashpoint\.Here\("([^"]+)"', path.read_text())
    }
    found |= {name for names in crash.POINTS.values() for name in names}
    found = {name for name in found if not name.startswith("gateway/")}  # of agents: test_agents.py
    found -= set(DELETION)  # test_delete.py
    found -= set(CUTS)  # of snapshots that someone requests: the second test
    middle = sorted(found - {*FIRST, *LAST, *AFTER_A_START})
    for late, before in AFTER_A_START.items():
        middle.insert(middle.index(before) + 1, late)
    assert found == {*FIRST, *middle, *LAST}, found ^ {*FIRST, *middle, *LAST}
    return [*FIRST, *middle, *LAST]


@pytest.fixture(scope="module")
def binary() -> Path:
    """`rolloutd` compiled with the crash points."""
    path = ROOT / "bin" / "crashpoint" / "rolloutd"
    command = ["go", "build", "-tags", "crashpoint", "-trimpath", "-o", f"{path.parent}/", "./rolloutd"]
    subprocess.run(command, cwd=ROOT / "cmd", check=True)
    return path


@dataclass
class Walk:
    """The run, and the file that names the next point."""

    running: Mesh
    order: Path
    run: str = ""

    def ask(self, point: str) -> None:
        self.order.with_name(self.order.name + ".done").unlink(missing_ok=True)
        staging = self.order.with_name("staging")
        staging.write_text(point)
        staging.rename(self.order)

    def died(self) -> bool:
        return self.order.with_name(self.order.name + ".done").exists()

    def go_on(self, job: Job, lock: bytes) -> None:
        """Resume the run if necessary. Calls may fail, because the called process may be the one
        that exits."""
        with contextlib.suppress(grpc.RpcError):
            if not self.run:
                request = run_pb2.CreateRunRequest(lock=lock, base_dir=str(job.folder), idempotency_key="the walk")
                self.run = self.running.scheduler.CreateRun(request, timeout=10).run.run_id
                return
            state = self.running.scheduler.GetRun(run_pb2.GetRunRequest(run_id=self.run), timeout=10).status.run.state
            if state == run_pb2.RUN_STATE_PAUSED or state in ENDED:
                self.running.scheduler.ResumeRun(run_pb2.ResumeRunRequest(run_id=self.run), timeout=10)

    def hold(self) -> None:
        with contextlib.suppress(grpc.RpcError):
            self.running.scheduler.PauseRun(run_pb2.PauseRunRequest(run_id=self.run), timeout=10)

    def restart(self, point: str) -> None:
        service = PROCESS.get(point.split("/")[0])
        if service is None:
            return  # a worker, which its supervisor restarts
        self.running.processes[service].wait(60)
        try:
            self.running.start_service(service)
        except AssertionError:
            if not self.died():  # at the next point, before it served
                raise


def test_the_run_survives_an_exit_at_every_crash_point(binary: Path, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", steps=STEPS, snapshot=3)
    config = job.write()
    with_points = Walk(sim_mesh(tmp_path / "walk", "seven", ROLLOUT_CRASH_FILE=str(tmp_path / "order")), tmp_path / "order")
    with_points.running.binary = binary
    reference = sim_mesh(tmp_path / "reference")
    walk = points()
    try:
        lock = reference.start().plan(config)
        undisturbed = finish(reference, submit(reference, lock, job))
        reference.stop()
        with_points.running.start()
        with_points.ask(walk[0])
        for number, point in enumerate(walk):
            began, last = time.monotonic(), number + 1 == len(walk)
            while not with_points.died():
                assert time.monotonic() < began + 180, f"{point} was not reached: {outcome(with_points)}"
                with_points.go_on(job, lock)
                with contextlib.suppress(AssertionError):
                    until(with_points.died, point, 1)
            if not last:
                if point not in FIRST and walk[number + 1] not in LAST:
                    with_points.hold()
                with_points.ask(walk[number + 1])
            with_points.restart(point)
            if with_points.run:
                audited(with_points.running, with_points.run, gone=with_points.died)
            print(f"{number + 1:3} {point}: {time.monotonic() - began:.1f} s", flush=True)
        state = None
        while state != run_pb2.RUN_STATE_SUCCEEDED:
            with_points.go_on(job, lock)
            state = with_points.running.status(with_points.run).run.state
        digest = with_points.running.status(with_points.run).run.weights_digest
        assert digest == undisturbed
        report = audited(with_points.running, with_points.run)
        figures = journals_agree(with_points.running, with_points.run, job)
        assert report["steps"] == STEPS and figures["steps"] == STEPS
        print(f"visited {len(walk)} crash points; {figures}")
    finally:
        stop(reference)
        stop(with_points.running)


def test_a_cut_and_its_restore_survive_an_exit(binary: Path, tmp_path: Path) -> None:
    captured, pinned, seeding = CUTS
    job = Job(tmp_path / "job", steps=40, mode="async", staleness=3, snapshot=50, keep_payloads=True)
    running = sim_mesh(tmp_path / "state", "seven", seconds=0.05, ROLLOUT_CRASH_FILE=str(tmp_path / "order"))
    running.binary = binary
    walk = Walk(running, tmp_path / "order")
    try:
        running.start()
        run = submit(running, running.plan(job.write()), job)
        running.until_step(run, 2)
        request = snapshot_pb2.TakeSnapshotsRequest(run_id=run, kinds=[snapshot_pb2.SNAPSHOT_KIND_BUFFER], name="cut")
        walk.ask(captured)
        with pytest.raises(grpc.RpcError):
            running.snapshots.TakeSnapshots(request, timeout=60)
        until(walk.died, captured, 10)
        walk.restart(captured)
        [taken] = running.snapshots.TakeSnapshots(request, timeout=60, wait_for_ready=True).snapshots
        verified = running.snapshots.VerifySnapshot(snapshot_pb2.VerifySnapshotRequest(snapshot_id=taken.snapshot_id))
        assert not verified.flaws
        running.scheduler.CancelRun(run_pb2.CancelRunRequest(run_id=run))

        restore = snapshot_pb2.RestoreSnapshotRequest(snapshot_id=taken.snapshot_id)
        walk.ask(pinned)
        with pytest.raises(grpc.RpcError):
            running.snapshots.RestoreSnapshot(restore, timeout=60)
        until(walk.died, pinned, 10)
        held = snapshot_pb2.ListSnapshotsRequest(pinned=True)
        assert [each.snapshot_id for each in running.snapshots.ListSnapshots(held).snapshots] == [taken.snapshot_id]
        walk.restart(pinned)
        until(lambda: not running.snapshots.ListSnapshots(held).snapshots, "that no snapshot is pinned", 30)

        walk.ask(seeding)
        restored = running.snapshots.RestoreSnapshot(restore).run.run_id
        until(walk.died, seeding, 60)
        walk.restart(seeding)
        finish(running, restored)
        assert audited(running, restored)["steps"] == job.steps - taken.step
    finally:
        stop(running)


def outcome(walk: Walk) -> str:
    """The state of the run, for messages."""
    try:
        status = walk.running.status(walk.run)
        return f"{status.run.step}/{status.run.total_steps} {status.phase} waits for {status.waiting_for}: {status.run.message}"
    except grpc.RpcError as error:
        return str(error)
