"""Runs without a model: both shapes end with the same weights, and recorded batches can be trained
again."""

from __future__ import annotations

from pathlib import Path

import pytest
from sim import Job, audited, finish, journals_agree, replay, sim_mesh, stop, submit


@pytest.mark.parametrize("shape", ["all", "seven"])
def test_the_ledger_agrees_with_the_journals(shape: str, tmp_path: Path) -> None:
    job = Job(tmp_path / "job")
    running = sim_mesh(tmp_path / "state", shape).start()
    try:
        run = submit(running, running.plan(job.write()), job)
        assert audited(running, run)["whole"]  # in the middle of the run
        digest = finish(running, run)
        report = audited(running, run)
        assert (report["steps"], report["weights_digest"]) == (job.steps, digest)
        assert report["excluded"] == {"ATTEMPTS_EXHAUSTED": 3}  # row 7, once per epoch
        assert journals_agree(running, run, job)["excluded"] == 3
    finally:
        stop(running)


def test_weights_over_the_network_give_the_same_run(tmp_path: Path) -> None:
    """Weights are streamed between workers or sent through the storage service, like for workers on
    other hosts."""
    digests = {}
    for way in ("auto", "stream", "store"):
        job = Job(tmp_path / way / "job", steps=6, way=way)
        running = sim_mesh(tmp_path / way / "state").start()
        try:
            run = submit(running, running.plan(job.write()), job)
            digests[way] = finish(running, run)
            assert audited(running, run)["whole"]
            journals_agree(running, run, job)
            logs = [path.read_text() for path in (running.state / "runs" / run / "workers").glob("inference-*.log")]
            assert len(logs) == job.workers
            # A worker that starts late on a busy machine may receive no weights, because the six
            # steps are already made.
            assert any("over the network" in log for log in logs) is (way != "auto"), way
        finally:
            stop(running)
    assert len(set(digests.values())) == 1, digests


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
    # otherwise the payloads of the first samples are deleted, and the replay starts at a snapshot
    assert (online["steps"][0]["step"] == 0) is keep


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
    outcome = replay(running, run, code=65)
    assert not outcome["same"] and len(outcome["steps"]) == 1
