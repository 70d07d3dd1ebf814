"""docs/algorithms.md against the code and the oracles' answers."""

from __future__ import annotations

from safetensors.torch import load_file

from rollout_workers.algorithms.registry import BUILDERS

from .oracle.document import TARGET, read, render, rows
from .oracle.table import GOLDEN


def test_the_page_is_what_the_code_says() -> None:
    text = TARGET.read_text()
    assert render(read(text)) == text, "make oracles"


def test_no_difference_is_larger_than_the_page_says() -> None:
    stated = read(TARGET.read_text())
    assert set(stated) == set(BUILDERS)
    for name, row in rows(load_file(GOLDEN)).items():
        assert set(row) == set(stated[name])
        for what, difference in row.items():
            # Another processor may round otherwise; the bar itself is that of the comparison.
            assert difference <= max(float(stated[name][what]), 2e-6) <= 1e-5, what
