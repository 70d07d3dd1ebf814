"""What a worker does for each group is read from its parts when someone asks."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest

from rollout.run.v1.run_pb2 import PromptGroup
from rollout_workers.environments.limits import Limits
from rollout_workers.inference.in_flight import InFlight
from rollout_workers.worker.calls import Call, Calls
from rollout_workers.worker.stream import WorkItem


def item(index: int, age: float) -> WorkItem:
    group = PromptGroup(run_id="run-1", index=index, position=80 + index, row_json=f'{{"row": {index}}}'.encode())
    return WorkItem(group, "reply", 1, arrived=time.monotonic() - age)


class Parts:
    """The puller and the sampler of a worker with six groups."""

    def __init__(self) -> None:
        self.items = [item(index, 10.0 * (6 - index)) for index in range(6)]

    def waiting_items(self) -> list[tuple[WorkItem, bool]]:
        return [(self.items[0], True), (self.items[1], False)]

    def active_items(self) -> list[WorkItem]:
        return self.items[2:]

    def doing(self) -> dict[str, tuple[str, float]]:
        now = time.time()
        return {"0/2/0": ("ENVIRONMENT", now - 30), "0/3/0": ("ENVIRONMENT", now - 29), "0/4/0": ("GENERATE", now - 3)}

    def unsent(self) -> dict[str, float]:
        return {"0/5/0": time.time() - 1}


def test_each_group_is_in_one_activity_and_the_longest_comes_first() -> None:
    parts, calls = cast(Any, Parts()), Calls()
    flight = InFlight(parts, parts, calls, Limits(name="game.py:Game", turns=True, turn_seconds=300))
    with calls.open(Call("REWARD", "judge.py:judge", (b'{"row": 2}',), 60.0, since=time.time() - 25)):
        found = flight.activities()
    assert [(a.doing, a.name, a.limit_seconds, list(a.positions), a.groups) for a in found] == [
        ("WEIGHTS", "", 0, [80], 1),
        ("SLOT", "", 0, [81], 1),
        ("ENVIRONMENT", "game.py:Game", 300, [83], 1),
        ("REWARD", "judge.py:judge", 60, [82], 1),
        ("GENERATE", "", 0, [84], 1),
        ("PUBLISH", "", 0, [85], 1),
    ]
    assert time.time() - found[3].since.ToMilliseconds() / 1000 == pytest.approx(25, abs=1)
    assert [a.name for a in flight.activities() if a.doing == "ENVIRONMENT"] == ["game.py:Game"], "the call has returned"


def test_a_call_is_open_until_it_returns() -> None:
    calls = Calls()
    with pytest.raises(KeyError), calls.open(Call("TOOL_CALL", "search", (b"a", b"b"), 30.0)):
        found = calls.of(b"b")
        assert found is not None and found.name == "search" and calls.of(b"c") is None
        raise KeyError
    assert calls.of(b"b") is None
