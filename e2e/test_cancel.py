"""A run whose calls of user code never end is cancelled in seconds and leaves no process, and
`rollout explain` names the call that it waits for."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from mesh import ROOT, until
from planted import alive, descendants, flag, job_of
from sim import TURN_SECONDS, Job, audited, finish

from rollout.run.v1 import run_pb2

pytestmark = pytest.mark.slow

# A call that never ends, for the prompts of one data set.
_HANGS = """import pathlib
import threading

HANG = pathlib.Path(__file__).with_name("hang")


def letters(samples):
    if HANG.exists() and samples[0].prompt.startswith(HANG.read_text()):
        threading.Event().wait()
    return [1.0 for _ in samples]
"""


@pytest.mark.parametrize(("prompts", "workers"), [("", 0), ("held", 0), ("held", 1)], ids=["training", "evaluation", "reserved"])
def test_a_cancel_does_not_wait_for_a_reward_that_never_ends(prompts: str, workers: int, tmp_path: Path) -> None:
    """The cancelled run has every committed step once, and continues when it is resumed."""

    def edit(config: Path) -> None:
        config.with_name("reward.py").write_text(_HANGS)
        config.with_name("held.jsonl").write_text("".join(json.dumps({"prompt": f"held {n}:"}) + "\n" for n in range(4)))
        text = config.read_text().replace("retries = 0", "retries = 0\ntimeout_seconds = 3600")
        if prompts:
            text = text.replace('train = "train.jsonl"', 'train = "train.jsonl"\neval = "held.jsonl"')
            text += "\n[eval]\nevery_steps = 4\n" + (f"workers = {workers}\n" if workers else "")
        config.write_text(text)

    job = Job(tmp_path / "job", steps=12, workers=1 + workers, snapshot=3)
    with job_of(job, tmp_path / "state", edit=edit, seconds=0.3) as stalled:
        running, run = stalled.running, stalled.run
        with flag(stalled.folder / "hang", prompts):
            stalled.root(lambda wait: wait["reason"] == "REWARD_CALL", "the call that hangs", 60)
            began = time.monotonic()
            running.scheduler.CancelRun(run_pb2.CancelRunRequest(run_id=run, drain=True))
            named = False
            while (state := running.status(run).run.state) != run_pb2.RUN_STATE_CANCELLED:
                assert time.monotonic() - began < 30, run_pb2.RunState.Name(state)
                found = stalled.explained()
                named = named or any(wait["reason"] == "REWARD_CALL" for wait in found.get("chain", ()))
                time.sleep(0.1)
            took = time.monotonic() - began
            assert took < 15, f"the cancel took {took:.1f} s"
            assert named or not prompts, "explain did not name the call while the run drained"
        audited(running, run)
        running.scheduler.ResumeRun(run_pb2.ResumeRunRequest(run_id=run))
        finish(running, run)
        audited(running, run)


_LETTERS = """
def letters(samples):
    return [sum(c.isalpha() for c in sample.completion) / max(1, len(sample.completion)) for sample in samples]
"""

# An environment and a tool that never return while there is a file `hang`, which says how.
_PLUGINS = """import asyncio
import json
import pathlib
import subprocess
import threading

from rollout.environment import Observation, Result, SingleEpisode

HANG = pathlib.Path(__file__).with_name("hang")


class Game(SingleEpisode):
    async def reset(self, task):
        return json.loads(task.row_json)["prompt"]

    async def step(self, turn):
        if HANG.exists() and HANG.read_text() == "awaits":
            process = await asyncio.create_subprocess_exec("sleep", "100000")
            await process.wait()
        if HANG.exists():
            threading.Event().wait()
        if turn.number == 1:
            return Result(reward=float(sum(c.isalpha() for c in turn.text)))
        return Observation(text="more", reward=0.0)


def add(a: int, b: int) -> int:
    \"\"\"Add two numbers.\"\"\"
    if HANG.exists():
        subprocess.run(["sleep", "100000"])
    return a + b
"""

_MANIFEST = """name = "{name}"
version = "1.0.0"
kind = "{kind}"
command = ["python", "-m", "rollout.hosting.sidecar", "{kind}=plugins.py:{name}"]
"""


@dataclass(frozen=True)
class Hanging:
    """A plugin that never returns. how: it `awaits` a program that it started, `blocks` its
    interpreter, or both (`program`). arguments: of the cancel."""

    kind: str
    how: str
    sidecar: bool
    arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "add" if self.kind == "tool" else "Game"

    @property
    def plugin(self) -> str:
        return f"plugins.{'toml' if self.sidecar else 'py'}:{self.name}"

    def job(self, at: Path) -> Job:
        return Job(
            at, steps=12, workers=1, snapshot=3, turns=self.kind != "tool", tool=self.plugin if self.kind == "tool" else ""
        )

    def edit(self, config: Path) -> None:
        config.with_name("plugins.py").write_text(_PLUGINS)
        config.with_name("reward.py").write_text(_LETTERS)
        config.with_name("plugins.toml").write_text(_MANIFEST.format(kind=self.kind, name=self.name))
        text = config.read_text().replace("game.py:Game", self.plugin).replace("args = { boxes = false, helpers = false }\n", "")
        config.write_text(text.replace(f"timeout_seconds = {TURN_SECONDS}", "timeout_seconds = 3600"))


@pytest.mark.parametrize(
    "plugin",
    [
        Hanging("environment", "awaits", sidecar=False),
        Hanging("environment", "blocks", sidecar=False),
        Hanging("environment", "awaits", sidecar=True),
        Hanging("environment", "blocks", sidecar=True),
        Hanging("tool", "program", sidecar=False),
        Hanging("tool", "program", sidecar=True),
        Hanging("tool", "program", sidecar=False, arguments=("--now",)),
        Hanging("environment", "awaits", sidecar=True, arguments=("--now",)),
    ],
    ids=lambda plugin: "".join((plugin.kind, "-", plugin.how, "-sidecar" * plugin.sidecar, *plugin.arguments)),
)
def test_a_cancel_leaves_no_process_of_a_plugin_that_never_returns(plugin: Hanging, tmp_path: Path) -> None:
    job = plugin.job(tmp_path / "job")
    with job_of(job, tmp_path / "state", edit=plugin.edit, seconds=0.3) as stalled:
        running, run = stalled.running, stalled.run
        with flag(stalled.folder / "hang", plugin.how):
            reason = "TOOL_CALL" if plugin.kind == "tool" else "ENVIRONMENT_STEP"
            stalled.root(lambda wait: wait["reason"] == reason, "the call that hangs", 60)
            found = descendants([process.pid for process in running.processes.values()])
            started = [command for _, command in found.values() if command.startswith("sleep")]
            assert started or plugin.how == "blocks", found
            began = time.monotonic()
            command = [str(ROOT / "bin" / "rollout"), "runs", "cancel", run, *plugin.arguments, "--state-dir", str(running.state)]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            until(lambda: running.status(run).run.state == run_pb2.RUN_STATE_CANCELLED, "the run to be cancelled", 30)
            took = time.monotonic() - began
            until(lambda: not alive(found), "the processes of the run to end", 10)
            assert took < 15, f"the cancel took {took:.1f} s"
        audited(running, run)
        running.scheduler.ResumeRun(run_pb2.ResumeRunRequest(run_id=run))
        finish(running, run)
        audited(running, run)
