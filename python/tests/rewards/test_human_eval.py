"""The reward of the example `human_eval`, on a task of the form of HumanEval."""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "human_eval" / "reward.py"
ROW = {
    "prompt": 'def twice(x: int) -> int:\n    """The double of x."""\n',
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n",
    "entry_point": "twice",
}


@dataclass
class Sample:
    completion: str
    row: dict[str, str]


@pytest.mark.parametrize(
    ("completion", "passes"),
    [
        ("    return 2 * x\n", 1.0),
        ("    print('noise')\n    return x + x", 1.0),
        ("    return x ** 2\n", 0.0),
        ("    return 2 * x)\n", 0.0),
        ("    raise SystemExit(0)\n", 0.0),
        ("    while True: pass\n", 0.0),
    ],
)
def test_a_completion_passes_if_its_tests_do(completion: str, passes: float) -> None:
    example = runpy.run_path(str(EXAMPLE))
    assert example["passes"]([Sample(completion, ROW)] * 2 if passes else [Sample(completion, ROW)]) == (
        [1.0, 1.0] if passes else [0.0]
    )
