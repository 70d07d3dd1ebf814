"""The learner and every inference worker are lost at once, together with the newest weights, which
are made again."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from faults import lose_host
from mesh import Mesh, until
from sim import Job, audited, finish, journals_agree, sim_mesh, stop, submit

from rollout.run.v1 import run_pb2

STEPS = 9
LOSE_AT = 3  # between two snapshots


@pytest.mark.parametrize(("phase", "way"), [("DELIVERING", "auto"), ("LEASING", "stream")])
def test_lost_weights_are_made_again(phase: str, way: str, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", steps=STEPS, way=way)
    running = sim_mesh(tmp_path / "state", seconds=0.05).start()
    try:
        run = submit(running, running.plan(job.write()), job)
        workers = hold(running, run, phase)
        lose_host(Path(running.status(run).run.directory), [worker.pid for worker in workers])
        finish(running, run)
        assert audited(running, run)["whole"]
        journals_agree(running, run, job)
    finally:
        stop(running)


@pytest.mark.parametrize("policy", ["keep", "reissue"])
def test_lost_weights_with_other_bits_begin_a_lineage(policy: str, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", steps=STEPS, mode="async", staleness=2, old_lineage=policy, snapshot=100)  # none to begin at
    running = sim_mesh(tmp_path / "state", seconds=0.05, ROLLOUT_SIM_INEXACT="1").start()
    try:
        run = submit(running, running.plan(job.write()), job)
        status = running.until_step(run, LOSE_AT)
        lose_host(Path(status.run.directory), [worker.pid for worker in status.workers])
        finish(running, run)
        report = audited(running, run)
        assert report["whole"] and report["steps"] == STEPS
        assert [lineage["lineage"] for lineage in report["lineages"]] == [1]
        assert report["lineages"][0]["old_lineage"] == policy
        assert report["weights_digest"] == running.status(run).run.weights_digest
    finally:
        stop(running)


def hold(running: Mesh, run: str, phase: str) -> list[run_pb2.Worker]:
    """Advance the run to a phase after the commit of a step: DELIVERING, where no inference worker
    has the new weights, or LEASING, where all may have them. Returns its workers."""
    workers = list(running.until_step(run, LOSE_AT).workers)
    learner = [worker for worker in workers if worker.kind == "learner"]
    others = [worker for worker in workers if worker.kind == "inference"]
    assert len(learner) == 1 and len(others) == 2
    if phase == "LEASING":
        return workers
    send(signal.SIGSTOP, learner)
    until(lambda: running.status(run).phase == "TRAINING", "a complete batch", 60)
    send(signal.SIGSTOP, others)
    send(signal.SIGCONT, learner)
    until(lambda: running.status(run).phase == phase, phase, 60)
    return workers


def send(number: signal.Signals, workers: Sequence[run_pb2.Worker]) -> None:
    for worker in workers:
        os.kill(worker.pid, number)
