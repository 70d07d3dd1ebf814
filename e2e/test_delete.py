"""A deleted run leaves nothing: no row, file, object, or stream, also if the services die during
the deletion. What another run needs stays."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
from pathlib import Path

import grpc
import pytest
from mesh import ROOT, Mesh, until
from sim import Job, finish, sim_mesh, stop, submit
from test_crashpoints import DELETION

from rollout.buffer.v1 import buffer_pb2
from rollout.event.v1 import event_pb2
from rollout.fence.v1 import fence_pb2
from rollout.run.v1 import run_pb2
from rollout.snapshot.v1 import snapshot_pb2
from rollout.storage.v1 import storage_pb2, storage_pb2_grpc
from rollout.trajectory.v1 import trajectory_pb2


def paths(running: Mesh) -> list[Path]:
    """All files and folders, while NATS may remove some."""
    return [Path(folder) / name for folder, folders, files in os.walk(running.state) for name in [*folders, *files]]


def databases(running: Mesh) -> list[Path]:
    return sorted(path for path in paths(running) if path.suffix == ".sqlite")


def traces(running: Mesh, run: str) -> list[str]:
    """Rows that contain the id of a run, and files that are named for it (streams are folders of
    the embedded NATS server)."""
    found = []
    for path in databases(running):
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                for row in database.execute(f'SELECT * FROM "{table}"'):
                    if any(run in value or run.encode() in value.encode() for value in row if isinstance(value, str)) or any(
                        run.encode() in value for value in row if isinstance(value, bytes)
                    ):
                        found.append(f"{path.name}: {table}: {str(row)[:300]}")
    found += [str(path) for path in paths(running) if run in str(path)]
    found += [str(path) for path in Path("/dev/shm").glob(f"rollout-{os.getuid()}/{run}*")]
    return found


def rows(running: Mesh) -> dict[str, int]:
    """The number of rows of each table that belongs to runs."""
    out = {}
    for path in databases(running):
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                where = " WHERE run_id <> ''" if table == "event" else ""  # others are of the services
                out[f"{path.name}/{table}"] = database.execute(f'SELECT count(*) FROM "{table}"{where}').fetchone()[0]
    # A row for each role of leaders, and for each deleted run one that expires and does not name
    # it.
    of_services = ("/lease", "/fence_leader", "/fence_deleted", "/sqlite_sequence")
    return {name: count for name, count in out.items() if not name.endswith(of_services)}


def told(running: Mesh, run: str) -> bool:
    """Whether the last event of a run that has succeeded is stored. It may follow the status."""
    path = next(path for path in databases(running) if path.name == "storage.sqlite")
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        states = database.execute("SELECT * FROM event WHERE run_id = ? AND kind = 'run.state'", (run,)).fetchall()
    return any(b"SUCCEEDED" in value for row in states for value in row if isinstance(value, bytes))


def arrive_late(running: Mesh, run: str) -> None:
    """Send what workers and services send of a run. Events are dropped, the rest is refused."""
    key = trajectory_pb2.TrajectoryKey(run_id=run, index=1)
    storage = storage_pb2_grpc.ArtifactServiceStub(running.channel(str(running.daemon("storage")["grpc"])))
    late = [
        event_pb2.Event(
            event_id=f"late-{kind}", run_id=run, kind=kind, service="inference-worker/inference-0", step=1, metrics={"loss": 1.0}
        )
        for kind in ("log", "step.committed", "sampling")
    ]
    for each in late:
        each.time.GetCurrentTime()
    running.events.AppendEvents(storage_pb2.AppendEventsRequest(events=late))
    fence = fence_pb2.Fence(incarnation=9, role="learner-controller", leader_epoch=9)
    snapshot = snapshot_pb2.Snapshot(run_id=run, kind=snapshot_pb2.SNAPSHOT_KIND_TRAIN_STATE, step=1)
    snapshot.files.add(path="x", digest="blake3-" + 64 * "0")
    refused = {
        "SaveEpisodes": lambda: running.snapshots.SaveEpisodes(
            snapshot_pb2.SaveEpisodesRequest(run_id=run, episodes=[snapshot_pb2.Episode(key=key, turns=1)])
        ),
        "CreateSnapshot": lambda: running.snapshots.CreateSnapshot(
            snapshot_pb2.CreateSnapshotRequest(snapshot=snapshot, directory=str(running.state), fence=fence)
        ),
        "PutArtifact": lambda: storage.PutArtifact(iter([storage_pb2.PutArtifactRequest(run_id=run, chunk=b"late")])),
        "PutArtifact of a leader": lambda: storage.PutArtifact(
            iter([storage_pb2.PutArtifactRequest(run_id=run, chunk=b"late", fence=fence)])
        ),
        "OpenLedger": lambda: running.buffer.OpenLedger(
            buffer_pb2.OpenLedgerRequest(
                run_id=run,
                config=buffer_pb2.LedgerConfig(group_size=1, groups_per_step=1, rows=1, order=buffer_pb2.LEASE_ORDER_POSITION),
            )
        ),
    }
    for name, call in refused.items():
        with pytest.raises(grpc.RpcError) as error:
            call()
        assert "was deleted" in error.value.details(), name  # type: ignore[attr-defined]
    running.snapshots.DropEpisodes(snapshot_pb2.DropEpisodesRequest(run_id=run, groups=[snapshot_pb2.EpisodeGroup(index=1)]))


def artifacts(running: Mesh) -> set[str]:
    return {path.name for path in (running.state / "artifacts").rglob("blake3-*")}


def command(running: Mesh, *arguments: str, code: int = 0) -> dict:
    """The output of `rollout` as JSON."""
    words = [str(ROOT / "bin" / "rollout"), "--format", "json", *arguments, "--state-dir", str(running.state)]
    outcome = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert outcome.returncode == code, f"{outcome.returncode}: {outcome.stdout[-3000:]}{outcome.stderr[-3000:]}"
    return json.loads(outcome.stdout if code == 0 else outcome.stderr)


def test_a_deleted_run_leaves_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", steps=8, snapshot=2)
    running = sim_mesh(tmp_path / "state").start()
    try:
        lock = running.plan(job.write())
        first = submit(running, lock, job)
        finish(running, first)
        until(lambda: told(running, first), "the last event of the first run", 20)
        before, stored = rows(running), artifacts(running)
        run = submit(running, lock, job)
        finish(running, run)
        assert traces(running, run)
        assert command(running, "runs", "delete", run, "--dry-run")["dry_run"] and traces(running, run)
        assert command(running, "runs", "delete", run, code=64)["error"]["exit_code"] == 64  # --yes is missing
        deleted = command(running, "runs", "delete", run, "--yes")
        assert [each["run_id"] for each in deleted["runs"]] == [run] and not deleted["refused"]
        until(lambda: traces(running, run) == [], "that nothing is left", 20)  # NATS removes folders afterwards
        assert rows(running) == before
        assert artifacts(running) == stored
        arrive_late(running, run)
        assert traces(running, run) == []
        assert rows(running) == before
        assert artifacts(running) == stored
        assert command(running, "runs", "delete", run, "--yes", code=66)["error"]["reason"] == "RUN_NOT_FOUND"
        command(running, "runs", "delete", "--state", "succeeded", "--yes")
        until(lambda: traces(running, first) == [], "that nothing of the first run is left", 20)
        assert artifacts(running) == set()
        assert not any(count for name, count in rows(running).items() if not name.endswith(("goose_db_version", "revision")))
    finally:
        stop(running)


def test_a_fork_keeps_its_snapshot(tmp_path: Path) -> None:
    running = sim_mesh(tmp_path / "state").start()
    try:
        job = Job(tmp_path / "job", steps=8, snapshot=2)
        lock = running.plan(job.write())
        origin = submit(running, lock, job)
        finish(running, origin)
        listed = running.snapshots.ListSnapshots(snapshot_pb2.ListSnapshotsRequest(run_id=origin)).snapshots
        start = listed[-1]  # the oldest
        fork = running.snapshots.RestoreSnapshot(snapshot_pb2.RestoreSnapshotRequest(snapshot_id=start.snapshot_id)).run.run_id
        finish(running, fork)
        refused = command(running, "snapshot", "delete", start.snapshot_id, "--yes", code=65)
        assert refused["error"]["reason"] == "SNAPSHOT_IN_USE" and fork in refused["error"]["fix"]
        [deleted] = command(running, "runs", "delete", origin, "--yes")["runs"]
        assert deleted["kept_snapshots"] == [start.snapshot_id]
        kept = running.snapshots.GetSnapshot(snapshot_pb2.GetSnapshotRequest(snapshot_id=start.snapshot_id)).snapshot
        assert {file.digest for file in kept.files} <= artifacts(running)
        again = command(running, "snapshot", "restore", start.snapshot_id, "--set", f"train.steps={start.step + 2}", "--detach")[
            "run_id"
        ]
        finish(running, again)
        command(running, "snapshot", "export", start.snapshot_id, "--to", str(tmp_path / "kept.tar"))
        command(running, "runs", "delete", fork, "--yes")
        assert command(running, "snapshot", "verify", start.snapshot_id)["flaws"] == []
        command(running, "runs", "delete", again, "--yes")
        assert artifacts(running) == set()
        until(
            lambda: [*traces(running, origin), *traces(running, fork), *traces(running, again)] == [], "that nothing is left", 20
        )
    finally:
        stop(running)


@pytest.fixture(scope="module")
def binary() -> Path:
    """`rolloutd` compiled with the crash points."""
    path = ROOT / "bin" / "crashpoint" / "rolloutd"
    words = ["go", "build", "-tags", "crashpoint", "-trimpath", "-o", f"{path.parent}/", "./rolloutd"]
    subprocess.run(words, cwd=ROOT / "cmd", check=True)
    return path


def test_a_deletion_continues_after_a_crash(binary: Path, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", steps=4, snapshot=2)
    order = tmp_path / "order"
    running = sim_mesh(tmp_path / "state", ROLLOUT_CRASH_FILE=str(order))
    running.binary = binary
    running.start()
    try:
        lock = running.plan(job.write())
        for point in DELETION:
            run = submit(running, lock, job)
            finish(running, run)
            order.write_text(point)
            with pytest.raises(grpc.RpcError):
                running.scheduler.DeleteRun(run_pb2.DeleteRunRequest(run_id=run), timeout=60)
            running.processes["all"].wait(60)
            assert traces(running, run), point
            running.start()
            until(lambda run=run: traces(running, run) == [], f"the deletion after {point}", 60)
    finally:
        stop(running)
