"""Checks that policies that act for many steps learn: CartPole with chunks of 1 and of 4 actions,
and Pendulum with continuous actions, each through the services of a run.

    python bench/learn_control.py [--tasks cartpole-1,cartpole-4,pendulum] [--seeds 0,1,2]

The environments are those of examples/multistep/environments.py, so gymnasium is not needed. A seed
is that of the first weights and of the run. The mean return of a run is that of the episodes of its
last 5 steps; a step has 16. The exit code is 1 unless it is above the bar of the task in each run,
and no run takes longer than 5 minutes.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

from rollout.client import connect  # noqa: E402

EXAMPLES = ROOT / "examples" / "multistep"
CACHE = ROOT / ".cache" / "learn-control"
STATE = CACHE / "state"
LAST = 5
LIMIT_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Control:
    """A task. shape: arguments of prepare.py. bar: of the mean return."""

    config: str
    shape: tuple[str, ...]
    bar: float
    sets: tuple[str, ...] = ()


def cartpole(chunk: int, steps: int) -> Control:
    """CartPole with chunks of ``chunk`` actions; runs do not end at the gate of the example."""
    shape = ("--observations", "4", "--actions", "2", "--chunk", str(chunk))
    sets = (f"multistep.chunk={chunk}", f"train.steps={steps}", 'gates.solved.when="reward/mean > 500"')
    return Control("cartpole.toml", shape, 400.0, sets)


TASKS: Mapping[str, Control] = {
    "cartpole-1": cartpole(1, 60),
    "cartpole-4": cartpole(4, 120),
    "pendulum": Control("pendulum.toml", ("--observations", "3", "--actions", "1", "--continuous"), -300.0),
}


def main() -> int:
    """Train and print a table."""
    parser = argparse.ArgumentParser(description="Train policies that act for many steps.")
    parser.add_argument("--tasks", default=",".join(TASKS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated (default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], help="override a key of the configuration")
    options = parser.parse_args()
    names = options.tasks.split(",")
    if unknown := [name for name in names if name not in TASKS]:
        parser.error(f"no task {', '.join(unknown)}; choose from {', '.join(TASKS)}")
    shutil.rmtree(CACHE, ignore_errors=True)
    missed = 0
    print(
        "| task | seed | first return | mean return | bar | steps to the bar | time |\n|---|---|---|---|---|---|---|", flush=True
    )
    try:
        for name in names:
            for seed in map(int, options.seeds.split(",")):
                missed += not train(name, seed, options.set)
    finally:
        rollout("daemon", "stop", "--now")
    return int(missed > 0)


def train(name: str, seed: int, sets: list[str]) -> bool:
    """Train one run and print its row. Returns whether it is good enough."""
    task, run = TASKS[name], f"{name}-{seed}"
    model = CACHE / "models" / run
    prepare = [sys.executable, str(EXAMPLES / "prepare.py"), *task.shape, "--seed", str(seed), str(model)]
    subprocess.run(prepare, check=True, stdout=subprocess.DEVNULL)
    given = [
        f"name='{run}'",
        f"seed={seed}",
        f"model.path='{model}'",
        f"data.train='{model}/episodes.jsonl'",
        "engine.threads=1",
        "train.threads=1",
        *task.sets,
        *sets,
    ]
    began = time.monotonic()
    overrides = [word for setting in given for word in ("--set", setting)]
    rollout("run", "--config", str(EXAMPLES / task.config), "--no-report", *overrides)
    seconds = time.monotonic() - began
    with connect(state=STATE) as client:
        returns = [value for _, value in sorted(client.metrics(run, ["reward/mean"])["reward/mean"])]
    mean = sum(returns[-LAST:]) / len(returns[-LAST:])
    first = next((number for number, value in enumerate(returns, 1) if value > task.bar), None)
    good = mean > task.bar and seconds < LIMIT_SECONDS
    print(
        f"| {name} | {seed} | {returns[0]:.0f} | {mean:.0f} | {task.bar:.0f} | {first or '-'} of {len(returns)} "
        f"| {seconds:.0f} s |{'' if good else ' **missed**'}",
        flush=True,
    )
    return good


def rollout(*arguments: str) -> None:
    """Call the command-line tool."""
    command = [str(ROOT / "bin" / "rollout"), "--state-dir", str(STATE), *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    raise SystemExit(main())
