"""Dynamic sampling with refill: each step trains on a full batch of groups with different rewards,
even if processes are killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from mesh import Mesh, until
from sim import GROUPS, Job, audited, finish, journals_agree, sim_mesh, stop, submit
from test_kills import alive
from test_sim import replay

from rollout.buffer.v1 import buffer_pb2
from rollout.run.v1 import run_pb2
from rollout.snapshot.v1 import snapshot_pb2


def test_a_killed_run_draws_the_same_groups(tmp_path: Path) -> None:
    digests, ends = {}, {}
    for name in ("whole", "killed"):
        job = Job(tmp_path / name / "job", steps=12, draws=True)
        running = sim_mesh(tmp_path / name / "state", seconds=0.05).start()
        try:
            run = submit(running, running.plan(job.write()), job)
            if name == "killed":
                hurt(running, run)
            digests[name] = finish(running, run)
            check(running, run, job)
            ends[name] = [step.end_position for step in steps_of(running, run)]
            assert replay(running, run)["same"]
        finally:
            stop(running)
    assert digests["whole"] == digests["killed"]
    assert ends["whole"] == ends["killed"]


def test_a_resumed_run_and_a_fork_draw_the_same_groups(tmp_path: Path) -> None:
    """Samples that a step drew beyond its batch are neither in the snapshot nor in the ledger of
    the other run, so both runs must draw them again."""
    job = Job(tmp_path / "job", steps=12, snapshot=3, draws=True)
    running = sim_mesh(tmp_path / "state", seconds=0.05).start()
    try:
        lock = running.plan(job.write())
        whole = submit(running, lock, job)
        digest, wanted = finish(running, whole), drawn(running, whole)
        # also before the snapshot from which the other run starts
        assert any(step.zero_advantage for step in steps_of(running, whole)[:6])

        resumed = submit(running, lock, job)
        running.until_step(resumed, 5)
        running.scheduler.CancelRun(run_pb2.CancelRunRequest(run_id=resumed))
        list(running.watch(resumed))
        assert running.status(resumed).run.state != run_pb2.RUN_STATE_SUCCEEDED
        running.scheduler.ResumeRun(run_pb2.ResumeRunRequest(run_id=resumed))
        assert finish(running, resumed) == digest
        assert drawn(running, resumed) == wanted
        check(running, resumed, job)

        taken = running.snapshots.ListSnapshots(snapshot_pb2.ListSnapshotsRequest(run_id=whole)).snapshots
        middle = next(snapshot for snapshot in taken if snapshot.step == 6)
        restored = snapshot_pb2.RestoreSnapshotRequest(snapshot_id=middle.snapshot_id)
        fork = running.snapshots.RestoreSnapshot(restored).run.run_id
        assert finish(running, fork) == digest
        assert drawn(running, fork) == wanted[6:]
        assert replay(running, fork)["same"]
    finally:
        stop(running)


def drawn(running: Mesh, run: str) -> list[tuple[int, list[tuple[int, int]], str]]:
    """For each step: where its drawing stopped, its groups by epoch and index, and its weights."""
    out = []
    for step in steps_of(running, run):
        batch = running.buffer.GetBatch(buffer_pb2.GetBatchRequest(run_id=run, step=step.step)).batch
        groups = sorted({(ref.key.epoch, ref.key.index) for ref in batch.samples})
        out.append((step.end_position, groups, step.weights_digest))
    return out


def hurt(running: Mesh, run: str) -> None:
    """Kill an inference worker, the learner, and then all services."""
    for kind, step in (("inference", 2), ("learner", 4)):
        workers = {worker.kind: worker for worker in running.until_step(run, step).workers}
        os.kill(workers[kind].pid, signal.SIGKILL)
    running.until_step(run, 6)
    again(running, run)


def again(running: Mesh, run: str) -> None:
    """Kill everything, restart it, and resume the run."""
    workers = list(running.status(run).workers)
    running.kill("all")
    until(lambda: not any(alive(worker.pid) for worker in workers), "the workers to exit after the daemon", 60)
    running.start()
    running.scheduler.ResumeRun(run_pb2.ResumeRunRequest(run_id=run))


def test_in_async_mode_surplus_groups_go_to_the_next_step(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", steps=12, mode="async", staleness=2, draws=True, keep_payloads=True)
    running = sim_mesh(tmp_path / "state", seconds=0.05).start()
    try:
        run = submit(running, running.plan(job.write()), job)
        running.until_step(run, 4)
        again(running, run)
        finish(running, run)
        check(running, run, job)
        assert replay(running, run)["same"]
    finally:
        stop(running)


def steps_of(running: Mesh, run: str) -> list[buffer_pb2.StepRecord]:
    return list(running.buffer.ListSteps(buffer_pb2.ListStepsRequest(run_id=run)).steps)


def check(running: Mesh, run: str, job: Job) -> None:
    """Check that the batches are full, and that every group that was excluded for equal rewards has
    a prompt whose rewards are always equal."""
    report = audited(running, run)
    assert report["whole"] and report["steps"] == job.steps
    journals_agree(running, run, job)
    steps = steps_of(running, run)
    assert {step.groups for step in steps} == {GROUPS}
    left_out = sum(step.zero_advantage for step in steps)
    assert 0 < left_out <= report["excluded"]["ZERO_ADVANTAGE"]
    groups = running.buffer.ListGroups(buffer_pb2.ListGroupsRequest(run_id=run)).groups
    rewards = {}
    for rows in running.buffer.ExportLedger(buffer_pb2.ExportLedgerRequest(run_id=run)):
        for sample in rows.samples:
            rewards.setdefault((sample.ref.key.epoch, sample.ref.key.index), set()).add(sample.ref.reward)
    for group in groups:
        found = rewards.get((group.key.epoch, group.key.index), set())
        if group.state == buffer_pb2.GROUP_STATE_CONSUMED:
            assert len(found) > 1, f"trained on {group}"
        elif group.reason == "ZERO_ADVANTAGE":
            assert len(found) == 1, f"{group}: {found}"
