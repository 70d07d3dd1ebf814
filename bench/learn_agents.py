"""Checks that agents learn: in each environment the policy must improve on held-out episodes with
the environment's rewards, and must not with shuffled ones.

    python bench/learn_agents.py [--environments guess,mcp,...] [--seeds 0,1,2] [--controls 0]
        [--resume]

Each environment is an example of the repository, with its warm-up; ``smollm2`` is reasoning-gym
with a pretrained model and no warm-up. Runs start with the weights of the warm-up: one for each
seed with the rewards of the environment, and one for each control seed in which an episode gets the
reward of an earlier one, chosen at random (bench/shuffled.py). A gain is the difference of the mean
rewards of the evaluations before the first and after the last step; both have standard errors. The
exit code is 1 unless every gain with the environment's rewards is more than three standard errors,
and no gain with shuffled rewards is. Results and the weights of the warm-ups are written to
.cache/learn-agents when they are ready; --resume keeps them and runs what is missing.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

from rollout.client import connect  # noqa: E402
from rollout.environments.install import install  # noqa: E402

EXAMPLES = ROOT / "examples"
CACHE = ROOT / ".cache" / "learn-agents"
RESULTS, STATE, WARM = CACHE / "results.json", CACHE / "state", CACHE / "warm"
ERRORS = 3
"""A gain above this many standard errors is one."""
ONE_CORE = "engine.threads=1", "train.threads=1"
"""Overrides of runs of the tiny model, which is so small that more threads only wait for each
other."""
REAL, SHUFFLED = "environment", "shuffled"


@dataclass(frozen=True, slots=True)
class Example:
    """An environment to learn. The paths are relative to ``examples``."""

    config: str
    prepare: str
    steps: int
    shuffled: tuple[str, ...]
    """Overrides of the run with shuffled rewards."""
    sets: tuple[str, ...] = ()
    """Overrides of both runs."""
    warm_up: str = ""
    package: str = ""
    """The name for ``rollout plugin install``."""
    pretrained: bool = False
    """Whether the model is SmolLM2-135M-Instruct instead of the tiny model."""


def shuffled_class(name: str) -> tuple[str, ...]:
    """Overrides for an environment whose class scores its episodes."""
    return ("environment.kind='python'", f"environment.path='{ROOT}/bench/shuffled.py:{name}'")


LEARNED: Mapping[str, Example] = {
    "guess": Example(
        "environments/guess.toml",
        "agent_openai/prepare.py",
        60,
        shuffled_class("ShuffledGuess"),
        sets=("train.learning_rate=5e-4",),
        warm_up="agent_openai/sft.toml",
    ),
    "calculator": Example(
        "tools/grpo.toml",
        "tools/prepare.py",
        15,
        (f"reward.plugin='{ROOT}/bench/shuffled.py:exact'",),
        sets=("train.groups_per_step=8",),
        warm_up="tools/sft.toml",
    ),
    "gymnasium": Example(
        "environments/frozen_lake.toml",
        "addition/prepare.py",
        60,
        shuffled_class("ShuffledGymnasium"),
        package="gymnasium",
    ),
    "reasoning_gym": Example(
        "environments/chain_sum.toml",
        "environments/prepare.py",
        30,
        shuffled_class("ShuffledReasoningGym"),
        warm_up="environments/chain_sum_sft.toml",
        package="reasoning_gym",
    ),
    "smollm2": Example(
        "environments/chain_sum_smollm2.toml",
        "environments/prepare.py",
        8,
        shuffled_class("ShuffledReasoningGym"),
        package="reasoning_gym",
        pretrained=True,
    ),
    "mcp": Example(
        "mcp/grpo.toml",
        "mcp/prepare.py",
        15,
        (f"reward.plugin='{ROOT}/bench/shuffled.py:exact'",),
        sets=("train.groups_per_step=8",),
        warm_up="mcp/sft.toml",
        package="mcp",
    ),
    "verifiers": Example(
        "environments/verifiers_guess.toml",
        "agent_openai/prepare.py",
        60,
        (
            *shuffled_class("ShuffledVerifiers"),
            "environment.args.path='guess_verifiers.py:load_environment'",
            f"environment.args.base_dir='{EXAMPLES}/environments'",
        ),
        warm_up="agent_openai/sft.toml",
        package="verifiers",
    ),
}


@dataclass(frozen=True, slots=True)
class Result:
    """The mean rewards of held-out episodes before and after training, with standard errors."""

    environment: str
    seed: int
    rewards: str
    before: float
    before_error: float
    after: float
    after_error: float
    seconds: int

    @property
    def errors(self) -> float:
        """The gain in standard errors."""
        gain, error = self.after - self.before, math.hypot(self.before_error, self.after_error)
        return gain / error if error else math.copysign(math.inf, gain) if gain else 0.0

    @property
    def expected(self) -> bool:
        """Whether the policy has improved, or, with shuffled rewards, has not."""
        return (self.errors > ERRORS) is (self.rewards == REAL)

    def __str__(self) -> str:
        return (
            f"| {self.environment} | {self.seed} | {self.rewards} | {self.before:.3f} ± {self.before_error:.3f} "
            f"| {self.after:.3f} ± {self.after_error:.3f} | {self.errors:+.1f} | {self.seconds} s |"
            f"{'' if self.expected else ' **unexpected**'}"
        )


def main() -> int:
    """Train and print a table."""
    parser = argparse.ArgumentParser(description="Train in each environment with its rewards and with shuffled ones.")
    parser.add_argument("--environments", default="", help=f"comma-separated, of {','.join(LEARNED)} (default: all)")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated (default: %(default)s)")
    parser.add_argument("--controls", default="0", help="seeds of the runs with shuffled rewards (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="keep results and warm-ups, and run only what is missing")
    options = parser.parse_args()
    names = options.environments.split(",") if options.environments else list(LEARNED)
    if unknown := [name for name in names if name not in LEARNED]:
        parser.error(f"no environment {', '.join(unknown)}; choose from {', '.join(LEARNED)}")
    runs = [(seed, REAL) for seed in numbers(options.seeds)] + [(seed, SHUFFLED) for seed in numbers(options.controls)]
    asked = [(name, seed, kind) for name in names for seed, kind in runs]
    if not options.resume:
        shutil.rmtree(WARM, ignore_errors=True)
    found = load() if options.resume else {}
    shutil.rmtree(STATE, ignore_errors=True)
    try:
        for key in asked:
            if key not in found:
                found[key] = train(*key)
                save(list(found.values()))
            print(found[key], flush=True)
    finally:
        rollout("daemon", "stop", "--now")
    results = [found[key] for key in asked]
    print("\n| environment | seed | rewards | before | after | gain / standard error | time |\n|---|---|---|---|---|---|---|")
    print("\n".join(map(str, results)))
    return 0 if all(result.expected for result in results) else 1


def numbers(listed: str) -> list[int]:
    """The seeds of an option, which may be empty."""
    return [int(seed) for seed in listed.split(",") if seed]


def warm_weights(example: Example) -> Path:
    """The folder with the weights of an example's warm-up, which it trains unless they are
    there."""
    name = "-".join(Path(example.warm_up).with_suffix("").parts).replace("_", "-")
    folder = WARM / name
    if not folder.exists():
        rollout("run", "--config", str(EXAMPLES / example.warm_up), "--no-report", *overrides(f"name='{name}'", ONE_CORE[1]))
        rollout("export", "weights", name, "--to", str(folder))
    return folder


def train(name: str, seed: int, kind: str) -> Result:
    """Train one run, and return what its first and last evaluation measured."""
    example, run = LEARNED[name], f"{name}-{seed}-{kind}".replace("_", "-")
    for script in (example.prepare, *(["smollm2/prepare.py"] if example.pretrained else [])):
        subprocess.run([sys.executable, str(EXAMPLES / script)], check=True, stdout=subprocess.DEVNULL)
    sets = [f"name='{run}'", f"seed={seed}", f"train.steps={example.steps}", f"eval.every_steps={example.steps}", *example.sets]
    if example.warm_up:
        sets.append(f"model.path='{warm_weights(example)}'")
    if example.package:
        sets.append(f"environment.python='{install(example.package, ROOT / '.tools' / 'plugins' / example.package)}'")
    sets += example.shuffled if kind == SHUFFLED else ()
    began = time.monotonic()
    rollout(
        "run",
        "--config",
        str(EXAMPLES / example.config),
        "--no-report",
        *overrides(*sets, *(() if example.pretrained else ONE_CORE)),
    )
    with connect(state=STATE) as client:
        measured = client.metrics(run, ["eval/reward", "eval/reward_stderr"])
    rewards, errors = (dict(measured[metric]) for metric in ("eval/reward", "eval/reward_stderr"))
    last = example.steps
    return Result(name, seed, kind, rewards[0], errors[0], rewards[last], errors[last], round(time.monotonic() - began))


def overrides(*settings: str) -> list[str]:
    """The arguments of the command line that override keys of a configuration."""
    return [word for setting in settings for word in ("--set", setting)]


def rollout(*arguments: str) -> None:
    """Call the command-line tool."""
    command = [str(ROOT / "bin" / "rollout"), "--state-dir", str(STATE), *arguments]
    subprocess.run(command, check=True, stdout=sys.stderr)


def load() -> dict[tuple[str, int, str], Result]:
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    return {(row["environment"], row["seed"], row["rewards"]): Result(**row) for row in rows}


def save(results: Sequence[Result]) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    staged = RESULTS.with_suffix(".new")
    staged.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    staged.rename(RESULTS)


if __name__ == "__main__":
    raise SystemExit(main())
