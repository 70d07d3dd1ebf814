"""SIGKILL of the services that create a snapshot, at random times (`KILLS=n`, default 3). The test
of every byte is in cmd/internal/crashtest."""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from mesh import Mesh
from sim import Job, sim_mesh, stop, submit

from rollout.snapshot.v1 import snapshot_pb2

KILLS = int(os.environ.get("KILLS", "3"))
SEED = int(os.environ.get("SEED", "7"))


@pytest.mark.timeout(120 + 30 * KILLS)
def test_killed_creations_leave_the_snapshots_before_them_whole(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", steps=1_000_000, mode="async", staleness=3, snapshot=1_000_000)
    running = sim_mesh(tmp_path / "state", "seven", seconds=0.02).start()
    dice = random.Random(SEED)
    try:
        run = submit(running, running.plan(job.write()), job)
        running.until_step(run, 2)
        began = time.monotonic()
        assert take(running, run, "first")
        duration = time.monotonic() - began
        made = ["first"]
        with ThreadPoolExecutor(1) as pool:
            for number in range(KILLS):
                name, victim, after = f"cut{number}", dice.choice(["snapshot", "storage"]), dice.uniform(0, duration)
                creation = pool.submit(take, running, run, name)
                time.sleep(after)
                running.kill(victim)
                running.start_service(victim)
                if creation.result():
                    made.append(name)
                print(f"{victim} was killed after {after:.3f} s of {duration:.3f} s: {'' if name in made else 'no '}snapshot")
                assert set(made) <= set(whole(running, run)), "a snapshot is gone"
        assert take(running, run, "last")
        assert "last" in whole(running, run)
    finally:
        stop(running)


def take(running: Mesh, run: str, name: str) -> bool:
    """Take a snapshot of the ledger. Returns whether it was made."""
    request = snapshot_pb2.TakeSnapshotsRequest(run_id=run, kinds=[snapshot_pb2.SNAPSHOT_KIND_BUFFER], name=name)
    try:
        return bool(running.snapshots.TakeSnapshots(request, timeout=60, wait_for_ready=True).snapshots)
    except grpc.RpcError as error:
        print(f"{name}: {error.code()} {error.details()}")  # type: ignore[attr-defined]
        return False


def whole(running: Mesh, run: str) -> list[str]:
    """The names of the snapshots of a run, which must all be whole."""
    names = []
    for snapshot in running.snapshots.ListSnapshots(snapshot_pb2.ListSnapshotsRequest(run_id=run), wait_for_ready=True).snapshots:
        request = snapshot_pb2.VerifySnapshotRequest(snapshot_id=snapshot.snapshot_id)
        flaws = running.snapshots.VerifySnapshot(request, wait_for_ready=True).flaws
        assert not flaws, f"{snapshot.snapshot_id} of step {snapshot.step}: {flaws}"
        names.append(snapshot.name)
    return names
