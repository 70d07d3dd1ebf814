"""Snapshots of a run that trains: what they contain at the cut, and what a restored run does with
it."""

from __future__ import annotations

import io
from pathlib import Path

from google.protobuf.proto import parse_length_prefixed
from mesh import Mesh
from sim import GROUPS, Job, audited, finish, sim_mesh, stop, submit
from test_snapshots import rollout

from rollout.buffer.v1 import buffer_pb2
from rollout.snapshot.v1 import snapshot_pb2


def rows_of(folder: Path) -> list[buffer_pb2.CutLedgerResponse]:
    """The rows of a materialized buffer snapshot."""
    rows = io.BytesIO((folder / "buffer" / "rows.binpb").read_bytes())
    return list(iter(lambda: parse_length_prefixed(buffer_pb2.CutLedgerResponse, rows), None))


def trainable(running: Mesh, snapshot: snapshot_pb2.Snapshot, folder: Path, staleness: int) -> int:
    """How many complete groups with different rewards of a snapshot the next step can take. The
    lease dissolves a group whose weights are too old by then, and takes one that completes later
    in its place, which differs between two runs."""
    request = snapshot_pb2.MaterializeSnapshotRequest(snapshot_id=snapshot.snapshot_id, directory=str(folder))
    running.snapshots.MaterializeSnapshot(request)
    rows = rows_of(folder)
    complete = (buffer_pb2.GROUP_STATE_READY, buffer_pb2.GROUP_STATE_LEASED)
    rewards: dict[tuple[int, int], set[float]] = {
        (group.key.epoch, group.key.index): set()
        for part in rows
        for group in part.groups
        if group.state in complete and group.min_version + staleness >= snapshot.step
    }
    for part in rows:
        for sample in part.samples:
            key = (sample.ref.key.epoch, sample.ref.key.index)
            if key in rewards:
                rewards[key].add(sample.ref.reward)
    return sum(len(found) > 1 for found in rewards.values())


def cut_and_restore(running: Mesh, job: Job, folder: Path) -> snapshot_pb2.Snapshot:
    """Take snapshots of a new run while it trains, finish it, and compare the run that is restored
    from them with it. Returns the snapshot of the ledger."""
    run = submit(running, running.plan(job.write()), job)
    kinds = [snapshot_pb2.SNAPSHOT_KIND_TRAIN_STATE, snapshot_pb2.SNAPSHOT_KIND_BUFFER]
    for attempt in range(10):  # until a whole batch was complete at the cut
        request = snapshot_pb2.TakeSnapshotsRequest(run_id=run, kinds=kinds, name=f"cut{attempt}")
        state, ledger = running.snapshots.TakeSnapshots(request).snapshots
        assert (state.kind, ledger.kind) == tuple(kinds)
        assert state.step == ledger.step
        assert {file.path for file in state.files} < {file.path for file in ledger.files}
        ready = trainable(running, ledger, folder / f"cut{attempt}", job.staleness)
        if ready >= GROUPS:
            break
    assert ready >= GROUPS, "no cut had a whole batch"
    step = ledger.step
    finish(running, run)
    audited(running, run)

    restore = snapshot_pb2.RestoreSnapshotRequest(snapshot_id=ledger.snapshot_id)
    restored = running.snapshots.RestoreSnapshot(restore).run.run_id
    finish(running, restored)
    audited(running, restored)
    request = buffer_pb2.GetBatchRequest(run_id=run, step=step + 1)
    want = running.buffer.GetBatch(request).batch
    request.run_id = restored
    got = running.buffer.GetBatch(request).batch
    assert got.batch_id == want.batch_id
    assert [sample.crc32c for sample in got.samples] == [sample.crc32c for sample in want.samples]
    assert payloads(running, restored, step + 1) == payloads(running, run, step + 1)
    steps = running.buffer.ListSteps(buffer_pb2.ListStepsRequest(run_id=restored)).steps
    assert [each.step for each in steps] == list(range(step + 1, job.steps + 1))
    return ledger


def test_a_restored_run_leases_the_same_next_batch(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", steps=40, mode="async", staleness=3, snapshot=50, keep_payloads=True)
    running = sim_mesh(tmp_path / "state", seconds=0.05).start()
    try:
        ledger = cut_and_restore(running, job, tmp_path)
        snapshot = ledger.snapshot_id
        assert rollout(tmp_path / "state", "snapshot", "verify", snapshot).get("flaws", []) == []

        largest = max(ledger.files, key=lambda file: file.bytes)
        flip_a_bit(tmp_path / "state", largest.digest, at=largest.bytes // 2)
        rollout(tmp_path / "state", "snapshot", "verify", snapshot, code=65)
        (flaw,) = running.snapshots.VerifySnapshot(snapshot_pb2.VerifySnapshotRequest(snapshot_id=snapshot)).flaws
        block = largest.bytes // 2 // 2**20 * 2**20
        assert (flaw.path, flaw.offset) == (largest.path, block) and 0 < flaw.bytes <= 2**20
    finally:
        stop(running)


def flip_a_bit(state: Path, digest: str, at: int) -> None:
    """Damage a stored artifact."""
    stored = next(path for path in state.rglob(f"*{digest.removeprefix('blake3-')}*") if path.is_file())
    data = bytearray(stored.read_bytes())
    data[at] ^= 1
    stored.chmod(0o600)
    stored.write_bytes(data)


def payloads(running: Mesh, run: str, step: int) -> list[bytes]:
    """The payloads of the batch of a step."""
    request = buffer_pb2.ReadPayloadsRequest(run_id=run, step=step)
    return [payload for part in running.buffer.ReadPayloads(request) for payload in part.payloads]


def test_episodes_that_are_not_saved_are_refused(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", steps=1000, turns=True, snapshot=1000)
    running = sim_mesh(tmp_path / "state", seconds=0.05).start()
    try:
        run = submit(running, running.plan(job.write()), job)
        running.until_step(run, 1)
        refusal = rollout(tmp_path / "state", "snapshot", "create", run, "--kind", "episodic", code=65)
        assert "EPISODES_NOT_SAVED" in refusal and "the environment game.py:Game" in refusal and "state_dict" in refusal
        taken = rollout(tmp_path / "state", "snapshot", "create", run, "--all")["snapshots"]
        assert [each["kind"] for each in taken] == ["SNAPSHOT_KIND_TRAIN_STATE", "SNAPSHOT_KIND_BUFFER"]
        folder = tmp_path / "files"
        written = rollout(
            tmp_path / "state", "snapshot", "extract", taken[1]["snapshot_id"], "--to", str(folder), "--path", "buffer"
        )
        assert written["files"] == 2 and rows_of(folder)
    finally:
        stop(running)
