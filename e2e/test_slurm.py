"""Workers that are jobs of Slurm (make check-slurm starts the cluster)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from conftest import GROUPS, SAMPLES, STEPS
from mesh import Mesh, assert_consumed_once, mesh, until
from scenario import SLOW
from test_gates import events

pytestmark = pytest.mark.skipif("SLURM_CONF" not in os.environ, reason="no Slurm cluster: run `make check-slurm`")


def toml(folder: Path, *more: str) -> Path:
    path = folder / "rolloutd.toml"
    path.write_text("\n".join(['[launch]\nkind = "slurm"\npartition = "main"\n[launch.inference]\nmemory = "2G"', *more]))
    return path


def jobs() -> list[str]:
    """The names of the jobs that run or wait."""
    command = ["squeue", "--noheader", "--format=%j", "--states=PENDING,RUNNING,COMPLETING"]
    return sorted(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def digest_of(running: Mesh, run: str) -> str:
    running.finish(run)
    return assert_consumed_once(running, run, steps=STEPS, groups_per_step=GROUPS, group_size=SAMPLES)


def test_jobs_train_the_same_bits_and_none_is_left(config: Path, tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "slurm").mkdir()
    with mesh(tmp_path / "local") as running:
        reference = digest_of(running, running.submit(config))
    with mesh(tmp_path / "slurm", config=toml(tmp_path)) as running:
        run = running.submit(config, SLOW)
        running.until_step(run, 1)
        assert jobs() == ["rollout-inference-0", "rollout-learner-0"]
        subprocess.run(["scancel", "--name=rollout-inference-0"], check=True)  # a node is drained: no crash
        running.finish(run)
        assert events(running, run, "worker.exited")[0].message.startswith("inference-0 was asked to stop by Slurm")
        assert digest_of(running, run) == reference
        until(lambda: jobs() == [], "the jobs to end with their run", 60)


def test_a_scheduler_that_is_killed_adopts_its_jobs(config: Path, tmp_path: Path) -> None:
    with mesh(tmp_path, config=toml(tmp_path, "[worker]\nresume_on_start = true")) as running:
        run = running.submit(config, SLOW)
        before = running.until_step(run, 1)
        running.kill("all")
        running.start_service("all")
        finished = running.finish(run)
        assert finished.incarnation == before.run.incarnation
        assert len(events(running, run, "worker.adopted")) == 2
        until(lambda: jobs() == [], "the jobs to end with their run", 60)
