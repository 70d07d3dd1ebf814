"""Episodes of many turns with a real model: equal bits after kills, an asynchronous run trained
again from its log, and trajectories of exactly the ids that the engine returned."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from collector import collecting
from conftest import ROOT
from mesh import Mesh, assert_consumed_once
from recording import ids_agree, recorded_mesh
from sim import replay, stop
from test_many_turns import kill_everything, workers

STEPS, GROUPS, SAMPLES = 12, 4, 4
CALCULATOR = ROOT / "examples" / "tools"


@pytest.fixture
def turns(config: Path) -> Path:
    """A job of the addition example's model, with episodes of two to five turns."""
    return config.with_name("turns.toml")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Mesh]:
    made = recorded_mesh(tmp_path / "state").start()
    yield made
    stop(made)


def consumed(running: Mesh, run: str) -> str:
    running.finish(run)
    return assert_consumed_once(running, run, steps=STEPS, groups_per_step=GROUPS, group_size=SAMPLES)


def test_kills_between_turns_do_not_change_the_digest(turns: Path, running: Mesh) -> None:
    reference = running.submit(turns)
    digest = consumed(running, reference)
    run = running.submit(turns)
    kill_everything(running, run, (2, 4, 6, 8))
    assert consumed(running, run) == digest
    trajectories, parts = ids_agree(running, reference)
    assert trajectories == STEPS * GROUPS * SAMPLES and parts > 2 * trajectories


def test_an_asynchronous_run_is_replayed_from_its_log(turns: Path, running: Mesh) -> None:
    run = running.submit(turns, 'mode="async"', "staleness.max_steps=2")
    os.kill(workers(running.until_step(run, 5))["inference"], signal.SIGKILL)
    running.finish(run)
    trajectories, parts = ids_agree(running, run)
    assert trajectories == STEPS * GROUPS * SAMPLES and parts > 2 * trajectories
    running.stop()
    replayed = replay(running, run)
    assert replayed["same"] and replayed["steps"][-1]["step"] == STEPS, replayed


def test_the_ids_of_a_run_with_tools_are_those_of_the_engine(tmp_path: Path) -> None:
    """Its groups are traced, with the calls of tools."""
    with collecting() as (collected, environment):
        running = recorded_mesh(tmp_path / "state")
        running.environment |= environment
        try:
            calculates(running.start())
            collected.has(("inference-worker", "tool call"))
        finally:
            stop(running)


def calculates(running: Mesh) -> None:
    subprocess.run([sys.executable, str(CALCULATOR / "prepare.py")], check=True)
    warm = running.submit(CALCULATOR / "sft.toml", "train.steps=60", "snapshot.every_steps=60")
    running.finish(warm)
    weights = Path(running.status(warm).run.directory, "weights", "v000060")
    smaller = ("train.steps=4", "train.groups_per_step=8", "eval.every_steps=0", "snapshot.keep_payloads=true")
    run = running.submit(CALCULATOR / "grpo.toml", f'model.path="{weights}"', *smaller)
    running.finish(run)
    trajectories, parts = ids_agree(running, run)
    assert trajectories == 4 * 8 * 8 and parts > 1.2 * trajectories, "few calls of the calculator"
