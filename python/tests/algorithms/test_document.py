"""docs/algorithms.md agrees with the code and the recorded results of the oracles."""

from __future__ import annotations

import inspect

import pytest
from safetensors.torch import load_file

from rollout_workers.algorithms.advantage import group_relative, leave_one_out
from rollout_workers.algorithms.importance import LOG_RATIO_LIMIT
from rollout_workers.algorithms.registry import BUILDERS, config_type

from .oracle.document import FORMULAS, TARGET, read, render, rows
from .oracle.table import DIFFERENCES, GOLDEN


def test_the_page_is_up_to_date() -> None:
    text = TARGET.read_text()
    assert render(read(text)) == text, "make oracles"


REDUCED = {"token": "/ N", "sequence": "/ S", "constant": "/ (S · max_tokens)"}
COMPARED = {
    ("group", "group"): "(reward - mean of group) / (std of group + 1e-4)",
    ("group", "none"): "A = reward - mean of group",
    ("leave_one_out", "none"): "A = reward - mean of the others",
}


SAMPLED = [name for name in BUILDERS if hasattr(config_type(name)(), "clip_high") or hasattr(config_type(name)(), "reduction")]


@pytest.mark.parametrize("name", SAMPLED)
def test_formulas_show_the_default_settings(name: str) -> None:
    """Checks the policy losses. Only their formulas depend on the values of settings."""
    settings, (policy, *rest) = config_type(name)(), FORMULAS[name].split("; ")
    if hasattr(settings, "reduction"):
        assert policy.split(" with ")[0].endswith(REDUCED[settings.reduction])
    if hasattr(settings, "normalization"):
        of_grpo = FORMULAS["grpo"] if "A as GRPO's" in rest else ""
        assert COMPARED[settings.baseline, settings.normalization] in of_grpo + FORMULAS[name]
    if hasattr(settings, "clip_high"):
        assert ("high above low" in policy) == (name == "dapo") and (name != "dapo" or settings.clip_high > settings.clip_low)
        assert ("overlong" in FORMULAS[name]) == (settings.overlong_share > 0)
        assert settings.dual_clip == settings.entropy_coefficient == 0


def test_numbers_in_the_prose_match_the_code() -> None:
    for estimator in (group_relative, leave_one_out):
        assert inspect.signature(estimator).parameters["epsilon"].default == 1e-4
    assert all(f"exp({sign}{LOG_RATIO_LIMIT:.0f})" in " ".join(DIFFERENCES.values()) for sign in ("", "±"))
    ppo, ipo, kto = (config_type(name)() for name in ("ppo", "ipo", "kto"))
    assert ppo.whiten_advantages and ppo.value_clip > 0 and "whitened" in FORMULAS["ppo"]
    assert ipo.length_normalize and "means over tokens" in FORMULAS["ipo"]
    assert kto.reference_point and "mismatched" in FORMULAS["kto"]


def test_no_difference_exceeds_the_one_on_the_page() -> None:
    stated = read(TARGET.read_text())
    assert set(stated) == set(BUILDERS)
    for name, row in rows(load_file(GOLDEN)).items():
        assert set(row) == set(stated[name])
        for what, difference in row.items():
            # Another processor may round otherwise; the bar itself is that of the comparison.
            assert difference <= max(float(stated[name][what]), 2e-6) <= 1e-5, what
