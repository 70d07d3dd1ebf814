"""Trains on preference pairs and labels with all services: rows become samples, nothing is sampled,
each row is trained once, and the learner computes the loss of held-out rows.

`make learn-check` tests whether these algorithms learn.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import ROOT
from mesh import assert_consumed_once, mesh

from rollout.client import connect

STEPS, GROUPS = 4, 8
SMALL = (f"train.steps={STEPS}", f"train.groups_per_step={GROUPS}", "train.warmup_steps=0", "engine.slots=32")
PAIRS = ROOT / "models" / "addition-data" / "preferences.jsonl"
JOBS = {
    "reward_model": ("reward_model", ("eval.every_steps=2",), 2),
    "kto": ("kto", ("eval.every_steps=0",), 1),
    "kto on pairs": ("kto", ("eval.every_steps=0", "algorithm.kto.paired=true", f'data.train="{PAIRS}"'), 2),
}
"""Example, overrides, samples per row."""


@pytest.mark.usefixtures("config")
@pytest.mark.timeout(600)  # the workers of three runs
def test_pairs_and_labels_are_trained_once(tmp_path: Path) -> None:
    with mesh(tmp_path / "state") as running, connect(state=running.state) as client:
        for name, (example, overrides, samples) in JOBS.items():
            run = running.submit(ROOT / "examples" / "addition" / f"{example}.toml", *SMALL, *overrides)
            running.finish(run)
            assert_consumed_once(running, run, steps=STEPS, groups_per_step=GROUPS, group_size=samples)
            margins = client.metrics(run, ["rewards/margin"])["rewards/margin"]
            assert [step for step, _ in margins] == list(range(1, STEPS + 1)), name
            held = client.metrics(run, ["eval/loss", "eval/rewards/accuracy"])
            assert [[step for step, _ in series] for series in held.values()] == [[0, 2, 4]] * 2 * (name == "reward_model")
            assert len({step.weights_digest for step in running.ledger(run)[1]}) == STEPS, (
                f"{name}: each step changes the weights"
            )
