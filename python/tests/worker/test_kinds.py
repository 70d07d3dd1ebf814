"""The kinds of workers are one table in Python and one in Go."""

from __future__ import annotations

import json
from pathlib import Path

from rollout_workers.kinds import COMMANDS, WORKERS

GOLDEN = Path(__file__).parents[3] / "schemas" / "golden" / "worker_kinds.json"


def test_kinds_are_those_of_go() -> None:
    assert sorted(WORKERS) == json.loads(GOLDEN.read_text())


def test_a_command_has_no_name_of_a_kind() -> None:
    assert not COMMANDS.keys() & WORKERS.keys()
