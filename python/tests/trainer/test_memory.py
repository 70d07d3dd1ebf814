"""What the backward pass of a layer needs, which the planner predicts the memory of a learner
from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from rollout_workers.trainer.model.freezing import checkpoint_gradients
from rollout_workers.trainer.model.policy import Policy
from rollout_workers.trainer.packing import pack
from rollout_workers.trainer.types import TrainSample

TABLE = Path(__file__).parents[3] / "services/planner/memory/testdata/activations.json"
"""Bytes per position and layer. The planner's test compares its formula with the same file."""
CASES = json.loads(TABLE.read_text())
ROWS, LENGTH = 8, 127


def saved(case: dict[str, Any], layers: int, *, checkpointing: bool = False) -> tuple[int, int]:
    """Bytes that a forward pass saves for the backward pass, without parameters, and its
    positions."""
    torch.manual_seed(0)
    sizes = {name: value for name, value in case.items() if name not in ("model", "dtype", "bytes")}
    config = getattr(transformers, f"{case['model']}Config")(num_hidden_layers=layers, vocab_size=54, **sizes)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, case["dtype"]))
    policy = Policy(model)
    if checkpointing:
        checkpoint_gradients(model)
    random = np.random.default_rng(0)
    mask = (np.arange(LENGTH) > 0).astype(np.uint8)
    samples = [
        TrainSample(str(row), 0, random.integers(0, 54, LENGTH).astype(np.int32), 1, mask, np.zeros(LENGTH, np.float32))
        for row in range(ROWS)
    ]
    (batch,) = pack(samples, range(ROWS), tokens=ROWS * LENGTH, share_prefixes=policy.share_prefixes)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs = policy.logprobs(batch)
    assert logprobs.tokens.requires_grad
    return sum(found.values()), batch.computed


def per_layer(case: dict[str, Any], *, checkpointing: bool = False) -> float:
    """Bytes per position and layer."""
    (few, positions), (many, _) = (saved(case, layers, checkpointing=checkpointing) for layers in (1, 3))
    return (many - few) / 2 / positions


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['model']}-{case['dtype']}")
def test_a_layer_saves_what_the_planner_predicts(case: dict[str, Any]) -> None:
    assert per_layer(case) == pytest.approx(case["bytes"], rel=0.01)


def test_with_checkpointing_a_layer_saves_its_input() -> None:
    case = CASES[0]
    assert per_layer(case, checkpointing=True) == case["hidden_size"] * 4
