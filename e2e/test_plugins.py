"""Sidecars in a run: a reward and an environment in Go whose processes are killed again and again.
The weights are those of a run without kills, so nothing is lost, and nothing is scored 0."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import GROUPS, SAMPLES
from mesh import ROOT, Mesh, assert_consumed_once, mesh, until

from rollout_testing.go import go_program


def manifest(folder: Path, called: Path) -> Path:
    """A manifest of the Go sidecar in a new folder. called: exists while the reward computes."""
    made = folder / "plugin.toml"
    command = f'command = ["{go_program("plugintest")}", "{called}"]'
    made.write_text(f'name = "digit_share"\nversion = "1.0.0"\nkind = "reward"\n{command}\n')
    return made


def rollout(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program = str(ROOT / "bin" / "rollout")
    return subprocess.run([program, "plugin", *arguments], cwd=folder, capture_output=True, text=True, timeout=120)


def test_a_plugin_is_made_tested_and_listed(tmp_path: Path) -> None:
    made = rollout("new", "tool", "total", folder=tmp_path)
    assert made.returncode == 0 and "made total: pyproject.toml, samples.jsonl, test_total.py, total.py" in made.stdout, (
        made.stderr
    )
    again = rollout("new", "tool", "total", folder=tmp_path)
    assert again.returncode == 64 and "total has files" in again.stderr, again.stderr
    missing = rollout("test", "none.py:total", folder=tmp_path)
    assert missing.returncode == 65 and "can't read none.py" in missing.stderr, missing.stderr
    tested = rollout("test", "total/total.py:total", folder=tmp_path)
    assert tested.returncode == 0 and "tool total/total.py:total passes" in tested.stdout, tested.stdout + tested.stderr
    (tmp_path / "total" / "samples.jsonl").write_text('{"arguments": {"a": 1, "b": 1}, "content": "3"}\n')
    failed = rollout("test", "total/total.py:total", "--format", "json", folder=tmp_path)
    assert failed.returncode == 65
    verdicts = {each["check"]: each for each in json.loads(failed.stdout)["verdicts"]}
    assert verdicts["golden"]["detail"] == 'sample 1: `content` is "2", expected "3"' and verdicts["golden"]["fix"]
    (tmp_path / "plugin.toml").write_text('name = "x"\nversion = "2.0.0"\nkind = "reward"\ncommand = ["python", "-V"]\n')
    listed = json.loads(rollout("list", "--format", "json", folder=tmp_path).stdout)["plugins"]
    [mine] = [each for each in listed if each["from"] == "manifest"]
    assert (mine["kind"], mine["version"], mine["use"]) == ("reward", "2.0.0", "plugin.toml:x") and mine["digest"].startswith(
        "sha256-"
    )
    assert {each["name"] for each in listed if each["from"] == "builtin"} >= {"gymnasium", "search"}


def processes(program: Path) -> Iterator[int]:
    """The processes of a program."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and os.readlink(entry / "exe") == str(program):
                yield int(entry.name)


def kill_in_calls(running: Mesh, run: str, called: Path, kills: int) -> None:
    """Kill the sidecar during its next call, once a step."""
    for _ in range(kills):
        called.unlink(missing_ok=True)
        until(called.exists, "a call of the sidecar", 120)
        step = running.status(run).run.step
        for pid in processes(go_program("plugintest")):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        running.until_step(run, step + 1)


def killed(config: Path, folder: Path, *, kills: int) -> None:
    steps = kills + 3
    settings = (f"train.steps={steps}", "eval.every_steps=0", "snapshot.every_steps=50")
    with mesh(folder / "python") as running:
        run = running.submit(config, *settings)
        running.finish(run)
        reference = assert_consumed_once(running, run, steps=steps, groups_per_step=GROUPS, group_size=SAMPLES)
    with mesh(folder / "sidecar") as running:
        called = folder / "called"
        run = running.submit(config, *settings, f'reward.plugin="{manifest(folder, called)}:digit_share"')
        kill_in_calls(running, run, called, kills)
        running.finish(run)
        digest = assert_consumed_once(running, run, steps=steps, groups_per_step=GROUPS, group_size=SAMPLES)
    assert digest == reference
    until(lambda: not list(processes(go_program("plugintest"))), "the sidecar to end with its worker", 30)


def test_a_sidecar_that_is_killed_in_its_calls_changes_no_weight(config: Path, tmp_path: Path) -> None:
    killed(config, tmp_path, kills=3)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a hundred steps, each with a process that starts again
def test_a_hundred_kills_of_a_sidecar_change_no_weight(config: Path, tmp_path: Path) -> None:
    killed(config, tmp_path, kills=100)


ROWS = "def numbers(split):\n    return [{'number': 1 + n % 5} for n in range(40)]\n"


def sidecar(folder: Path, kind: str, name: str) -> Path:
    """A manifest of the program of `examples/plugins/go` in a new folder."""
    made = folder / f"{name}.toml"
    made.write_text(f'name = "{name}"\nversion = "1.0.0"\nkind = "{kind}"\ncommand = ["{go_program("words")}"]\n')
    return made


def kill_after_steps(running: Mesh, run: str, steps: tuple[int, ...]) -> int:
    """Kill the sidecars after each of the steps. Returns how many were killed."""
    killed = 0
    for step in steps:
        running.until_step(run, step)
        for pid in processes(go_program("words")):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
    return killed


def test_an_environment_in_go_from_rows_of_a_plugin_changes_no_weight_when_it_is_killed(config: Path, tmp_path: Path) -> None:
    """Its episodes are played again, or continue from their saved state."""
    steps = 6
    (tmp_path / "rows.py").write_text(ROWS)
    settings = (
        f"train.steps={steps}",
        f'environment.path="{sidecar(tmp_path, "environment", "guess")}:guess"',
        f'data.train="{tmp_path}/rows.py:numbers"',
        "engine.workers=1",
    )
    with mesh(tmp_path / "state") as running:
        reference = running.submit(config.with_name("turns.toml"), *settings)
        running.finish(reference)
        digest = assert_consumed_once(running, reference, steps=steps, groups_per_step=4, group_size=4)
        run = running.submit(config.with_name("turns.toml"), *settings)
        assert kill_after_steps(running, run, (1, 3)) >= 2
        running.finish(run)
        assert assert_consumed_once(running, run, steps=steps, groups_per_step=4, group_size=4) == digest
    until(lambda: not list(processes(go_program("words"))), "the sidecar to end with its worker", 30)
