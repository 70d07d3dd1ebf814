"""Runs without a model: both shapes end in the same weights, and what was trained can be trained again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from mesh import ROOT, Mesh
from sim import Job, audited, finish, journals_agree, sim_mesh, stop, submit


@pytest.mark.parametrize("shape", ["all", "seven"])
def test_the_ledger_agrees_with_what_was_written_down_apart(shape: str, tmp_path: Path) -> None:
    job = Job(tmp_path / "job")
    running = sim_mesh(tmp_path / "state", shape).start()
    try:
        run = submit(running, running.plan(job.write()), job)
        assert audited(running, run)["whole"]  # in the middle
        digest = finish(running, run)
        report = audited(running, run)
        assert (report["steps"], report["weights_digest"]) == (job.steps, digest)
        assert report["excluded"] == {"ATTEMPTS_EXHAUSTED": 3}  # row 7, once an epoch
        assert journals_agree(running, run, job)["excluded"] == 3
    finally:
        stop(running)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("keep", [True, False])
def test_replay_gives_the_recorded_weights(mode: str, keep: bool, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", mode=mode, staleness=2 if mode == "async" else 0, keep_payloads=keep)
    running = sim_mesh(tmp_path / "state", seconds=0.05).start()
    try:
        run = submit(running, running.plan(job.write()), job)
        finish(running, run)
        assert audited(running, run)["whole"]
        online = replay(running, run)
        running.stop()
        offline = replay(running, run)
    finally:
        stop(running)
    assert online == offline
    assert online["same"] and online["steps"][-1]["step"] == job.steps
    assert (online["steps"][0]["step"] == 0) is keep  # else the first samples are gone, and it begins with a snapshot


def test_replay_names_the_step_that_differs(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", mode="async", staleness=1, keep_payloads=True)
    running = sim_mesh(tmp_path / "state").start()
    try:
        run = submit(running, running.plan(job.write()), job)
        finish(running, run)
        running.stop()
    finally:
        stop(running)
    model = job.folder / "model" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"\xff")
    told = replay(running, run, code=65)
    assert not told["same"] and len(told["steps"]) == 1


def replay(running: Mesh, run: str, code: int = 0) -> dict:
    """What `rollout replay` says."""
    worker = f"{sys.executable} -m rollout_workers.sim"
    command = [
        str(ROOT / "bin" / "rollout"),
        "--state-dir",
        str(running.state),
        "--format",
        "json",
        "replay",
        run,
        "--worker",
        worker,
    ]
    told = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={"PATH": "/usr/bin:/bin", **running.environment}
    )
    assert told.returncode == code, f"{told.returncode}: {told.stdout[-3000:]}{told.stderr[-3000:]}"
    return json.loads(told.stdout)
