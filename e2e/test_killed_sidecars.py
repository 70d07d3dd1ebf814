"""Runs whose sidecars of each kind are killed again and again, during their calls and between them.
The weights are those of a run without kills, so nothing is lost, and nothing is scored 0."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from mesh import ENDED, Mesh, assert_consumed_once, until
from recording import ids_agree
from sim import GROUPS, SAMPLES, Job, audited, finish, sim_mesh, stop, submit

from rollout_testing.go import go_program

_MANIFEST = """name = "{name}"
version = "1.0.0"
kind = "{kind}"
command = ["{program}", "{called}"]
"""
CALL_SECONDS = 30.0


@dataclass(frozen=True)
class Sidecar:
    """The Go sidecar of the conformance suite as one plugin. folder: of its manifest."""

    folder: Path
    kind: str
    name: str

    @property
    def plugin(self) -> str:
        return f"{self.kind}.toml:{self.name}"

    @property
    def called(self) -> Path:
        """Has the id of a process that is in a call, or was."""
        return self.folder.parent / f"{self.kind}-called"

    def write(self) -> None:
        text = _MANIFEST.format(name=self.name, kind=self.kind, program=go_program("plugintest"), called=self.called)
        (self.folder / f"{self.kind}.toml").write_text(text)

    def pids(self) -> list[int]:
        """Its processes, one for each worker, and one more while the planner calls it."""
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and f"\0{self.called}\0".encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
        return found

    def in_a_call(self, ended: Callable[[], bool]) -> int:
        """Wait for the next call. Returns the id of its process; 0 if the run ends before."""
        found: list[str] = []

        def called() -> bool:
            with contextlib.suppress(FileNotFoundError):
                found.append(self.called.read_text())
            return bool(found and found[-1]) or ended()

        self.called.unlink(missing_ok=True)
        until(called, f"a call of {self.plugin}", CALL_SECONDS)
        return int(found[-1]) if found and found[-1] else 0


def _kill(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def killed(running: Mesh, run: str, sidecars: list[Sidecar], kills: int, dice: random.Random) -> Counter[str]:
    """Kill sidecars of a run: two of three times the process of a call, otherwise any process at
    any time. A step is committed after each second kill, so that every call succeeds in the end.
    Returns how many were killed, by kind; fewer if the run ends before."""

    def ended() -> bool:
        return running.status(run).run.state in ENDED

    done = Counter[str]()
    while done.total() < kills and not ended():
        sidecar, during = sidecars[done.total() % len(sidecars)], "between calls"
        if dice.random() < 2 / 3:
            pid, during = sidecar.in_a_call(ended), "in a call"
        else:
            time.sleep(dice.uniform(0, 0.5))
            pid = dice.choice(sidecar.pids() or [0])
        if pid and _kill(pid):
            done[f"{sidecar.kind} {during}"] += 1
        if done.total() % 2 == 0:
            step = running.status(run).run.step
            until(lambda step=step: ended() or running.status(run).run.step > step, "the next step", 60)
    return done


def survives(at: Path, job: Job, sidecars: list[Sidecar], kills: int) -> None:
    running = sim_mesh(at / "state", seconds=0.02).start()
    try:
        config = job.write()
        for sidecar in sidecars:
            sidecar.write()
        text = config.read_text().replace("reward.py:letters", "reward.toml:digit_share")
        text = text.replace("game.py:Game", "environment.toml:Play").replace("args = { boxes = false, helpers = false }\n", "")
        config.write_text(text)
        lock = running.plan(config)
        reference = submit(running, lock, job)
        digest = finish(running, reference)
        run = submit(running, lock, job)
        done = killed(running, run, sidecars, kills, random.Random(kills))
        assert done.total() == kills, done
        assert finish(running, run) == digest, "the weights differ from those of the run without kills"
        made = assert_consumed_once(running, run, steps=job.steps, groups_per_step=GROUPS, group_size=SAMPLES)
        report = audited(running, run)
        assert made == digest and report["whole"]
        trajectories, turns = ids_agree(running, run)
        failed = report["counts"]["infra_failed"]
        print(f"\n{dict(done)}: {job.steps} steps, {trajectories} samples, {turns} turns, {failed} failed and sampled again")
        until(lambda: not any(sidecar.pids() for sidecar in sidecars), "the sidecars to end with their workers", 30)
    finally:
        stop(running)


def environment(at: Path, kills: int) -> None:
    job = Job(at / "job", steps=kills + 3, turns=True, keep_payloads=True)
    survives(at, job, [Sidecar(job.folder, "environment", "Play")], kills)


def tool_and_reward(at: Path, kills: int) -> None:
    job = Job(at / "job", steps=kills + 3, tool="tool.toml:add", keep_payloads=True)
    survives(at, job, [Sidecar(job.folder, "tool", "add"), Sidecar(job.folder, "reward", "digit_share")], kills)


def test_an_environment_that_is_killed_changes_no_weight(tmp_path: Path) -> None:
    environment(tmp_path, 4)


def test_a_tool_and_a_reward_that_are_killed_change_no_weight(tmp_path: Path) -> None:
    tool_and_reward(tmp_path, 6)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("sidecars", "kills"), [(environment, 34), (tool_and_reward, 66)])
def test_a_hundred_kills_change_no_weight(sidecars: Callable[[Path, int], None], kills: int, tmp_path: Path) -> None:
    sidecars(tmp_path, kills)
