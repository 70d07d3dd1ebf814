"""The settings of each algorithm without any key set, compared with the golden table that Go reads
too."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from rollout.config.v1.run_config_pb2 import RunConfig
from rollout_workers.algorithms.registry import BUILDERS
from rollout_workers.learner.settings import algorithm_settings

GOLDEN = Path(__file__).parents[3] / "schemas" / "golden" / "algorithm_defaults.txt"
REQUIRED = {"teacher"}  # settings without a default


def golden(name: str, mode: str) -> dict[str, Any]:
    """The column of an algorithm in the second table."""
    table = GOLDEN.read_text().split("\n\n")[1].splitlines()
    rows = [line.split() for line in table if not line.startswith("#")]
    column = rows[0].index(name)
    cells = {row[0]: row[column].split("|")[-1 if mode == "async" else 0] for row in rows[1:]}
    return {key: json.loads(cell) for key, cell in cells.items() if cell != "-"}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("name", BUILDERS)
def test_effective_defaults_match_the_golden_table(name: str, mode: str) -> None:
    config = json_format.ParseDict({"mode": mode, "sampling": {"max_tokens": 128}, "algorithm": {name: {}}}, RunConfig())
    settings = algorithm_settings(config)
    got = {field.name: getattr(settings, field.name) for field in fields(settings) if field.name not in REQUIRED}
    assert got == golden(name, mode)
