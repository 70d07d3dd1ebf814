"""The families of algorithms that `make learn-check` trains: initial weights, data, and thresholds.

The measures of a run:

    accuracy    share of held-out sums that are answered correctly, greedily, after the last step
    gain        increase of the held-out reward (for sums: of the accuracy) during the run
    climbed     mean reward of the samples of the last ten steps, minus that of the first two
    preferred   share of pairs whose chosen answer has the higher (implicit) reward, mean over the last ten steps
    margin      implicit reward of desirable completions minus that of others, mean over the last ten steps
    nearer      decrease of the divergence from the teacher, from the first five to the last ten steps, as a share
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
FIRST, LAST = 5, 10
BEGINNING = 2

Steps = Sequence[Mapping[str, float]]
Evaluations = Sequence[Mapping[str, float]]


def accuracy(_: Steps, evaluations: Evaluations) -> float:
    return evaluations[-1]["eval/reward"]


def gain(_: Steps, evaluations: Evaluations) -> float:
    return evaluations[-1]["eval/reward"] - evaluations[0]["eval/reward"]


def climbed(steps: Steps, _: Evaluations) -> float:
    first, last = steps[:BEGINNING], steps[-LAST:]
    return statistics.fmean(step["reward/mean"] for step in last) - statistics.fmean(step["reward/mean"] for step in first)


def preferred(steps: Steps, _: Evaluations) -> float:
    return statistics.fmean(step["rewards/accuracy"] for step in steps[-LAST:])


def margin(steps: Steps, _: Evaluations) -> float:
    return statistics.fmean(step["rewards/margin"] for step in steps[-LAST:])


def nearer(steps: Steps, _: Evaluations) -> float:
    first = statistics.fmean(step["kl/teacher"] for step in steps[:FIRST])
    return 1 - statistics.fmean(step["kl/teacher"] for step in steps[-LAST:]) / first


@dataclass(frozen=True, slots=True)
class Family:
    """The start, the data, and the threshold of a family."""

    config: Path
    overrides: tuple[str, ...]
    measure: Callable[[Steps, Evaluations], float]
    threshold: float
    table: str = ""
    """The lines that replace the config's `[algorithm]` table."""
    start: str = "warm"
    """The initial weights: `warm` (about half of the sums are right), `weak` (few are right), or,
    if empty, the config's model."""


def sampled(table: str, *, threshold: float, overrides: tuple[str, ...] = ()) -> Family:
    """A member of the GRPO family, with the example's config and another table."""
    config = EXAMPLES / "addition" / "grpo.toml"
    return Family(config, ("train.steps=80", "eval.every_steps=80", *overrides), gain, threshold, table)


def supervised(steps: int, threshold: float) -> Family:
    """The example's supervised warm-up, starting with random weights."""
    overrides = (f"train.steps={steps}", f"eval.every_steps={steps}")
    return Family(EXAMPLES / "addition" / "sft.toml", overrides, accuracy, threshold, start="")


STARTS = {
    "warm": [supervised(steps, 0.4) for steps in (375, 500, 625)],
    "weak": [supervised(steps, 0.15) for steps in (150, 225, 300, 375)],
}
"""The initial weights of other families: the first snapshot that reaches its threshold, because the
accuracy rises suddenly, and at a different time for each seed. Distillation starts with `weak`, and
its teacher is `warm`."""

# A bar is half of the median that docs/benchmarks.md records, or more where it was more already:
# half of a share of pairs would be chance.
ADDITION = {
    "sft": supervised(500, 0.392),
    "grpo": sampled("[algorithm.grpo]", threshold=0.146),
    "dr_grpo": sampled("[algorithm.dr_grpo]", threshold=0.137),
    # With the 4 tokens of the example, the longest right answers would be overlong, because DAPO
    # penalizes lengths near the limit.
    "dapo": sampled("[algorithm.dapo]", threshold=0.147, overrides=("sampling.max_tokens=8",)),
    "gspo": sampled("[algorithm.gspo]", threshold=0.144),
    "cispo": sampled("[algorithm.cispo]", threshold=0.146),
    "rloo": sampled("[algorithm.rloo]", threshold=0.126),
    "reinforce_pp": sampled("[algorithm.reinforce_pp]", threshold=0.132),
    "online_dpo": Family(EXAMPLES / "addition" / "online_dpo.toml", ("train.steps=80", "eval.every_steps=80"), gain, 0.114),
    "ppo": Family(EXAMPLES / "ppo-tiny.toml", ("train.steps=60", "eval.every_steps=60"), gain, 0.162),
    "dpo": Family(EXAMPLES / "addition" / "dpo.toml", ("eval.every_steps=100",), preferred, 0.8),
    "ipo": Family(EXAMPLES / "addition" / "dpo.toml", ("eval.every_steps=100",), preferred, 0.8, "[algorithm.ipo]\nbeta = 0.1"),
    "kto": Family(EXAMPLES / "addition" / "kto.toml", ("eval.every_steps=100",), margin, 0.104),
    "reward_model": Family(EXAMPLES / "addition" / "reward_model.toml", (), preferred, 0.75),
    "distillation": Family(
        EXAMPLES / "rewards" / "distillation.toml",
        ("train.steps=240", "train.groups_per_step=256", "train.learning_rate=1e-3"),
        nearer,
        0.416,
        start="weak",
    ),
}

SMOLLM2 = {
    # 16 prompts are held out, so a gain has a standard error of 0.1; with 320 samples it is 0.02.
    "grpo": Family(EXAMPLES / "smollm2" / "grpo.toml", ("eval.every_steps=24",), climbed, 0.4, start=""),
    "dpo": Family(EXAMPLES / "smollm2" / "dpo.toml", (), preferred, 0.8, start=""),
}

MODELS = {"addition": ADDITION, "smollm2": SMOLLM2}
