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


def ready_groups(running: Mesh, snapshot: str, folder: Path) -> list[buffer_pb2.GroupRecord]:
    """The complete groups of a snapshot, in the order of their completion."""
    running.snapshots.MaterializeSnapshot(snapshot_pb2.MaterializeSnapshotRequest(snapshot_id=snapshot, directory=str(folder)))
    groups = [group for part in rows_of(folder) for group in part.groups]
    complete = (buffer_pb2.GROUP_STATE_READY, buffer_pb2.GROUP_STATE_LEASED)
    return sorted((group for group in groups if group.state in complete), key=lambda group: group.arrival)


def test_a_restored_run_leases_the_same_next_batch(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", steps=40, mode="async", staleness=3, snapshot=50, keep_payloads=True)
    running = sim_mesh(tmp_path / "state", seconds=0.05).start()
    try:
        run = submit(running, running.plan(job.write()), job)
        for attempt in range(10):  # until a whole batch was complete at the cut
            taken = rollout(
                tmp_path / "state", "snapshot", "create", run, "--kind", "train_state,buffer", "--name", f"cut{attempt}"
            )
            state, ledger = taken["snapshots"]
            assert (state["kind"], ledger["kind"]) == ("SNAPSHOT_KIND_TRAIN_STATE", "SNAPSHOT_KIND_BUFFER")
            assert state["step"] == ledger["step"]
            assert {file["path"] for file in state["files"]} < {file["path"] for file in ledger["files"]}
            ready = ready_groups(running, ledger["snapshot_id"], tmp_path / f"cut{attempt}")
            if len(ready) >= GROUPS:
                break
        assert len(ready) >= GROUPS, "no cut had a whole batch"
        step, snapshot = int(ledger["step"]), ledger["snapshot_id"]
        assert rollout(tmp_path / "state", "snapshot", "verify", snapshot).get("flaws", []) == []
        finish(running, run)
        audited(running, run)

        restored = rollout(tmp_path / "state", "snapshot", "restore", snapshot, "--detach")["run_id"]
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
        assert [each.step for each in steps] == list(range(step + 1, 41))

        largest = max(ledger["files"], key=lambda file: int(file["bytes"]))
        flip_a_bit(tmp_path / "state", largest["digest"], at=int(largest["bytes"]) // 2)
        rollout(tmp_path / "state", "snapshot", "verify", snapshot, code=65)
        (flaw,) = running.snapshots.VerifySnapshot(snapshot_pb2.VerifySnapshotRequest(snapshot_id=snapshot)).flaws
        block = int(largest["bytes"]) // 2 // 2**20 * 2**20
        assert (flaw.path, flaw.offset) == (largest["path"], block) and 0 < flaw.bytes <= 2**20
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
