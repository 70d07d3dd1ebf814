"""Copies prompts and random numbers to the slots of a group's samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rollout_workers.engines.base import SamplingParams
from rollout_workers.engines.transformers.kv import KvCache, KvShape
from rollout_workers.engines.transformers.philox import uniforms
from rollout_workers.engines.transformers.slots import SlotTable

OWNER: Any = SimpleNamespace(text=None)


@pytest.mark.parametrize(
    ("slots", "counts"),
    [
        ([2, 3, 4, 5, 6, 7], [2, 2, 2]),  # adjacent slots
        ([6, 7, 2, 3, 4, 5], [2, 2, 2]),  # adjacent slots in another order of the groups
        ([2, 3, 4, 5, 6, 7], [3, 1, 2]),  # groups of different sizes
        ([0, 2, 3, 5, 7, 8], [2, 2, 2]),  # slots with gaps
        ([2, 5, 3, 6, 4, 7], [2, 2, 2]),  # adjacent slots that do not belong to one group
    ],
)
def test_each_prompt_is_copied_to_the_slots_of_its_group(slots: list[int], counts: list[int]) -> None:
    cache = KvCache.empty(KvShape(3, 2, 4, torch.float32), 9, 8, torch.device("cpu"))
    prompts = torch.randn(3, 3, 5, 2, 2, 4)
    cache.spread(np.array(slots), counts, prompts)
    owner = np.repeat(np.arange(3), counts).tolist()
    for slot in range(9):
        held = cache.data[:, slot]
        if slot in slots:
            assert torch.equal(held[:, :5], prompts[:, owner[slots.index(slot)]])
        else:
            assert not held.any()
        assert not held[:, 5:].any()


def test_random_numbers_do_not_depend_on_the_block_in_which_they_are_drawn() -> None:
    table = SlotTable(3, 3, 64, 10)
    limits, slots = np.array([1, 3, 39]), np.arange(3)
    table.occupy(slots, [OWNER] * 3, np.array([2, 2, 2]), [5, 6, 2**63 + 7], SamplingParams(64), limits, ())
    expected = uniforms(table.seeds, np.zeros(3, np.int64), 40)
    for token in range(39):
        going = slots[token < limits]
        assert (table.uniform(going) == expected[going, token]).all()
        table.generated[going] += 1
