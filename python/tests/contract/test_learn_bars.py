"""The bars of `make learn-check` are those of docs/benchmarks.md, and at least half of the median
that it records."""

from __future__ import annotations

import re
import runpy
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BENCH = runpy.run_path(str(ROOT / "bench" / "families.py"))
TITLES = {
    "SFT": "sft",
    "GRPO": "grpo",
    "Dr. GRPO": "dr_grpo",
    "DAPO": "dapo",
    "CISPO": "cispo",
    "REINFORCE++": "reinforce_pp",
    "GSPO": "gspo",
    "RLOO": "rloo",
    "online DPO": "online_dpo",
    "PPO": "ppo",
    "DPO": "dpo",
    "IPO": "ipo",
    "KTO": "kto",
    "reward model": "reward_model",
    "distillation": "distillation",
}


def table() -> dict[tuple[str, str], list[float]]:
    """(model, family) -> the figures of each seed and the bar."""
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    section = text.split("## Does every algorithm learn?")[1].split("\n## ")[0]
    found: dict[tuple[str, str], list[float]] = {}
    for title, cells in re.findall(r"^\| ([^|]+) \| [^|]+ \| ([\d. |]+) \|$", section, re.MULTILINE):
        family, _, model = title.partition(", ")
        found[model.lower() or "addition", TITLES[family]] = [float(cell) for cell in cells.split(" | ")]
    return found


RECORDED = table()


def test_every_family_has_figures() -> None:
    assert set(RECORDED) == {(model, name) for model, families in BENCH["MODELS"].items() for name in families}


@pytest.mark.parametrize(("model", "family"), RECORDED)
def test_the_bar_is_at_least_half_of_the_median(model: str, family: str) -> None:
    *seeds, bar = RECORDED[model, family]
    assert BENCH["MODELS"][model][family].threshold == bar
    assert round(statistics.median(seeds) / 2, 3) <= bar < min(seeds)
