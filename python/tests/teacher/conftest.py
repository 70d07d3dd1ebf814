"""A student of the addition example, and an endpoint with a teacher of other weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_testing.run import Example
from rollout_workers.data.prompts import Text
from tests.teacher.server import Served


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Example:
    return Example.prepare(tmp_path_factory.mktemp("addition"))


@pytest.fixture(scope="session")
def text(example: Example) -> Text:
    return Text.load(str(example.model))


@pytest.fixture(scope="session")
def teacher(example: Example) -> Any:
    """The student's model with a bias towards a fifth of the vocabulary."""
    model = AutoModelForCausalLM.from_pretrained(example.model).eval()
    head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size)
    head.weight = model.lm_head.weight
    with torch.no_grad():
        head.bias.copy_(torch.where(torch.arange(len(head.bias)) % 5 == 0, 3.0, 0.0))
    model.lm_head = head
    return model


@pytest.fixture
def served(teacher: Any, text: Text) -> Iterator[Served]:
    server = Served(teacher, text.tokenizer)
    yield server
    server.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path
