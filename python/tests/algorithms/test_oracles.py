"""Every loss, its gradient, and every estimator against what TRL and verl answered
(``oracle/record.py``), to 1e-5 in float32."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from .oracle import ours
from .oracle.batches import CASES, batch
from .oracle.table import DIFFERENCES, GOLDEN, distance

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("what", ours.LOSSES)
def test_loss_and_gradient_are_those_of_the_oracle(golden: dict[str, Tensor], what: str, case: str) -> None:
    loss, gradient = ours.LOSSES[what](batch(case))
    for part, found in (("loss", loss), ("gradient", gradient)):
        if (what, case, part) in DIFFERENCES:  # tested below
            continue
        wanted = golden[f"{what}@{case}#{part}"]
        assert wanted.isfinite().all()
        assert distance(found, wanted) <= TOLERANCE, f"{part}: {found} is not {wanted}"


@pytest.mark.parametrize("case", CASES)
def test_estimates_are_those_of_the_oracle(golden: dict[str, Tensor], case: str) -> None:
    found = ours.estimates(batch(case))
    wanted = {name.split("/", 1)[1]: tensor for name, tensor in golden.items() if name.endswith(f"@{case}#estimate")}
    assert {f"{what}@{case}#estimate" for what in found} == set(wanted)
    for what, tensor in found.items():
        assert distance(tensor, wanted[f"{what}@{case}#estimate"]) <= TOLERANCE, what


def test_the_kl_controller_is_that_of_the_oracle(golden: dict[str, Tensor]) -> None:
    assert distance(ours.controller(), golden["verl/controller@any#estimate"]) <= 1e-12


def test_every_answer_of_an_oracle_is_compared(golden: dict[str, Tensor]) -> None:
    losses = {name.split("@")[0] for name in golden if not name.endswith("#estimate")}
    assert losses == set(ours.LOSSES)


@pytest.mark.parametrize(("what", "case", "part"), DIFFERENCES)
def test_deliberate_differences_are_still_there(golden: dict[str, Tensor], what: str, case: str, part: str) -> None:
    loss, gradient = ours.LOSSES[what](batch(case))
    found = loss if part == "loss" else gradient
    assert distance(found, golden[f"{what}@{case}#{part}"]) > TOLERANCE, "it agrees now: take it off the list"


def test_a_wrong_loss_would_be_noticed(golden: dict[str, Tensor]) -> None:
    wrong = ours.tokens(batch("random"), "grpo", clip_low=0.05)
    assert distance(wrong[1], golden["trl/grpo/token@random#gradient"]) > TOLERANCE
    broken, whole, huge = torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2e9])
    assert distance(broken, whole) == distance(whole, broken) == torch.inf
    assert distance(torch.tensor([1.5, 2e9]), huge) == 0.5
    assert distance(torch.tensor([1.0, 3e9]), huge) == 0.5
