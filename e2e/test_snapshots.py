"""A snapshot that one control plane exports continues on another, whose host shares nothing with
the first."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from conftest import ROOT
from sim import Job, audited, finish, sim_mesh, stop, submit

from rollout.buffer.v1 import buffer_pb2
from rollout.snapshot.v1 import snapshot_pb2


def run_rollout(state: Path, *arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command-line tool in a folder."""
    command = [str(ROOT / "bin" / "rollout"), "--state-dir", str(state), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


def rollout(state: Path, *arguments: str, code: int = 0) -> Any:
    """What the command-line tool prints as JSON; its error if it exits with another code than 0."""
    done = run_rollout(state, *arguments, *(() if code else ("--format", "json")))
    assert done.returncode == code, done.stderr + done.stdout
    return done.stderr if code else json.loads(done.stdout)


def test_an_exported_snapshot_continues_elsewhere(tmp_path: Path) -> None:
    job, here, there = Job(tmp_path / "job", steps=12, snapshot=3), tmp_path / "here", tmp_path / "there"
    exported = tmp_path / "snapshot.tar"
    running = sim_mesh(here, seconds=0.01).start()
    try:
        run = submit(running, running.plan(job.write()), job)
        digest = finish(running, run)
        taken = running.snapshots.ListSnapshots(snapshot_pb2.ListSnapshotsRequest(run_id=run)).snapshots
        middle = next(snapshot.snapshot_id for snapshot in taken if snapshot.step == 6)
    finally:
        stop(running)
    rollout(here, "snapshot", "export", middle, "--to", str(exported))  # without a control plane
    assert "already exists" in rollout(here, "snapshot", "export", middle, "--to", str(exported), code=73)
    shutil.rmtree(here)
    shutil.rmtree(job.folder)  # the other host has neither state nor inputs

    running = sim_mesh(there, seconds=0.01).start()
    try:
        half = tmp_path / "half.tar"
        half.write_bytes(exported.read_bytes()[: exported.stat().st_size // 2])
        assert "is damaged at byte" in rollout(there, "snapshot", "import", str(half), code=65)
        inputs = ("--inputs", str(tmp_path / "inputs"))
        imported = rollout(there, "snapshot", "import", str(exported), *inputs)["snapshot_id"]
        assert "already exists" in rollout(there, "snapshot", "import", str(exported), *inputs, code=73)
        again = run_rollout(there, "snapshot", "import", str(exported), folder=tmp_path)
        assert imported in again.stdout, "a second import changes nothing"
        assert f"the inputs of the run are written to {tmp_path}/snapshot-inputs" in again.stderr
        assert (tmp_path / "snapshot-inputs" / "reward.py").exists()

        restored = rollout(there, "snapshot", "restore", imported, "--detach")["run_id"]
        assert finish(running, restored) == digest
        audited(running, restored)
        steps = running.buffer.ListSteps(buffer_pb2.ListStepsRequest(run_id=restored)).steps
        assert [step.step for step in steps] == list(range(7, 13))

        forked = rollout(there, "snapshot", "fork", imported, "--set", "train.steps=9", "--detach")["run_id"]
        assert finish(running, forked) != digest
        assert running.status(forked).run.step == 9 and running.status(forked).run.from_snapshot == imported
        assert f"{imported} (step 6 of {run})" in run_rollout(there, "runs", "show", forked).stdout
        rollout(there, "runs", "delete", restored, forked, "--yes")
        assert rollout(there, "snapshot", "verify", imported)["flaws"] == [], "an imported snapshot is deleted by request only"
    finally:
        stop(running)


def test_validate_starts_no_daemon(tmp_path: Path) -> None:
    job = Job(tmp_path / "job")
    valid = run_rollout(tmp_path / "state", "validate", "--config", str(job.write()))
    assert valid.returncode == 0 and "is valid" in valid.stdout and valid.stderr == "", valid
    wrong = run_rollout(tmp_path / "state", "validate", "--config", str(job.write()), "--set", "train.steps=0")
    assert wrong.returncode == 65 and "train.steps" in wrong.stdout, wrong
    assert not (tmp_path / "state").exists()
