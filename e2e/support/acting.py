"""A small job whose policy acts for many steps: CartPole with chunks of two actions."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mesh import ROOT, Mesh, assert_consumed_once

GROUPS, SAMPLES = 4, 2

HOSTED = ("engine.workers=2", "multistep.environments=12", "multistep.environment_workers=3")
"""Each of two rollout ranks has rows of two environment ranks, and the second environment rank has
rows of both. A rollout rank has as many rows as without."""


def write_job(folder: Path, *, steps: int, tokens: bool = False) -> Path:
    """Write the policy, its environment, and the configuration, and return the path of that one.
    tokens: whether its actions are tokens of a language model."""
    script = ROOT / "examples" / "multistep" / "prepare.py"
    shape = ["--observations", "4", "--actions", "2", "--chunk", "2", "--hidden", "8", "--episodes", "16", "--held-out", "6"]
    shape = ["--limits", "2.4", "3", "0.21", "3", "--tokens", *shape] if tokens else shape
    subprocess.run([sys.executable, str(script), *shape, str(folder / "policy")], check=True, capture_output=True)
    (folder / "environments.py").write_text((ROOT / "examples" / "multistep" / "environments.py").read_text())
    (folder / "job.toml").write_text(
        f"""name = "cartpole"
[model]
path = "policy"
[data]
train = "policy/episodes.jsonl"
eval = "policy/heldout.jsonl"
[sampling]
group_size = {SAMPLES}
[multistep]
environment = "environments.py:CartPole"
environments = 6
chunk = 2
max_steps = 60
{'logprob_type = "token_level"' if tokens else ""}
[algorithm.ppo]
epochs = 2
[train]
steps = {steps}
groups_per_step = {GROUPS}
learning_rate = 1e-2
[snapshot]
every_steps = 3
"""
    )
    return folder / "job.toml"


def replay(running: Mesh, run: str) -> dict:
    """The output of `rollout replay`."""
    place = ("--config", str(running.config)) if running.config else ("--state-dir", str(running.state))
    command = [str(ROOT / "bin" / "rollout"), "--format", "json", "replay", run, *place]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return json.loads(outcome.stdout)


@dataclass
class ActingJob:
    """Like `sim.Job`, with environment workers."""

    folder: Path
    steps: int = 20
    mode: str = "sync"

    def plan(self, running: Mesh) -> bytes:
        """The lock of the plan."""
        self.folder.mkdir(parents=True, exist_ok=True)
        config = write_job(self.folder, steps=self.steps)
        return running.plan(config, *HOSTED, "limits.worker_restarts=1000", "limits.worker_start_seconds=600")

    def agree(self, running: Mesh, run: str) -> dict[str, int]:
        """Check that each episode is consumed by the step of its window, and that `rollout replay`
        trains the recorded episodes to the same weights."""
        replayed = replay(running, run)
        assert replayed["same"] and replayed["steps"][-1]["step"] == self.steps, replayed
        assert_consumed_once(running, run, steps=self.steps, groups_per_step=GROUPS, group_size=SAMPLES)
        return {"steps": self.steps, "trained": self.steps * GROUPS * SAMPLES}
