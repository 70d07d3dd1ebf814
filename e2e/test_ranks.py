"""A learner with two processes has the same ledger and the same bits as one process, independent of
which process is killed and of how they were started."""

import json
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
from conftest import GROUPS, SAMPLES
from mesh import ROOT, Mesh, assert_consumed_once, mesh

STEPS = 3
TORCHRUN = """#!/bin/sh
[ "$1" = learner ] || exec {worker} "$@"
exec {python} -m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 0 --module rollout_workers learner
"""
OVERRIDES = ("train.ranks=2", f"train.steps={STEPS}", "eval.every_steps=0", "snapshot.every_steps=1")


def second_rank(running: Mesh) -> int:
    """The process of rank 1 of the learner."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (path / "cmdline").read_bytes(), (path / "environ").read_bytes()
        except OSError:
            continue  # the process has exited, or belongs to another test
        if b"rollout_workers.learner.ranks" in command and os.fsencode(running.state) in environment:
            return int(path.name)
    raise AssertionError("the learner has no second rank")


def finished(running: Mesh, run: str) -> str:
    running.finish(run)
    return assert_consumed_once(running, run, steps=STEPS, groups_per_step=GROUPS, group_size=SAMPLES)


@pytest.fixture(scope="module")
def undisturbed(config: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run with two ranks that rank 0 started, without faults."""
    with mesh(tmp_path_factory.mktemp("undisturbed")) as running:
        return finished(running, running.submit(config, *OVERRIDES))


def test_two_ranks_give_equal_bits_although_one_is_killed(config: Path, tmp_path: Path, undisturbed: str) -> None:
    with mesh(tmp_path) as running:
        run = running.submit(config, *OVERRIDES)
        running.until_step(run, 1)
        os.kill(second_rank(running), signal.SIGKILL)
        assert finished(running, run) == undisturbed
        log = Path(running.status(run).run.directory, "workers", "learner-0.log").read_text()
        assert "rank 1 of the learner was killed by SIGKILL" in log


def test_torchrun_can_start_the_ranks(config: Path, tmp_path: Path, undisturbed: str) -> None:
    program, settings = tmp_path / "worker", tmp_path / "rolloutd.toml"
    worker, python = shlex.quote(str(ROOT / "bin" / "rollout-worker")), shlex.quote(sys.executable)
    program.write_text(TORCHRUN.format(worker=worker, python=python))
    program.chmod(0o755)
    settings.write_text(f"[worker]\ncommand = [{json.dumps(str(program))}]\npython = {json.dumps(sys.executable)}\n")
    with mesh(tmp_path / "state", config=settings) as running:
        assert finished(running, running.submit(config, *OVERRIDES)) == undisturbed
