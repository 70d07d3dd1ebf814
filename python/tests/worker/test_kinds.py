"""Python and Go have the same kinds of workers."""

from __future__ import annotations

import json
from pathlib import Path

from rollout_workers.kinds import COMMANDS, WORKERS

GOLDEN = Path(__file__).parents[3] / "schemas" / "golden" / "worker_kinds.json"


def test_kinds_equal_those_of_go() -> None:
    assert sorted(WORKERS) == json.loads(GOLDEN.read_text())


def test_no_command_has_the_name_of_a_kind() -> None:
    assert not COMMANDS.keys() & WORKERS.keys()
