"""Kills the inference worker, then the learner, then `rolloutd` with SIGKILL in one run. No sample
is lost or trained twice."""

import os
import signal
from pathlib import Path

import pytest
from conftest import GROUPS, SAMPLES
from mesh import assert_consumed_once, mesh, until

from rollout.run.v1 import run_pb2

STEPS = 30
CONFIG = (f"train.steps={STEPS}", "snapshot.every_steps=5", "eval.every_steps=0")


@pytest.mark.slow
@pytest.mark.timeout(600)  # the workers of two runs, three times
def test_a_run_survives_a_kill_of_each_process(config: Path, tmp_path: Path) -> None:
    with mesh(tmp_path / "reference") as running:
        run = running.submit(config, *CONFIG)
        running.finish(run)
        reference = assert_consumed_once(running, run, steps=STEPS, groups_per_step=GROUPS, group_size=SAMPLES)
    with mesh(tmp_path / "killed") as running:
        run = running.submit(config, *CONFIG)
        for kind, step in (("inference", 4), ("learner", 12)):
            workers = {worker.kind: worker for worker in running.until_step(run, step).workers}
            os.kill(workers[kind].pid, signal.SIGKILL)
        workers = list(running.until_step(run, 20).workers)
        running.kill("all")
        until(lambda: not any(alive(worker.pid) for worker in workers), "the workers to exit after the daemon", 60)
        running.start()
        assert running.status(run).run.state == run_pb2.RUN_STATE_INTERRUPTED
        running.scheduler.ResumeRun(run_pb2.ResumeRunRequest(run_id=run))
        running.finish(run)
        digest = assert_consumed_once(running, run, steps=STEPS, groups_per_step=GROUPS, group_size=SAMPLES)
        assert digest == reference


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] != "Z"
