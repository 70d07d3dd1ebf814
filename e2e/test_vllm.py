"""vLLM loads the folder that a learner writes: weights with merged adapters, and the tokenizer."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from mesh import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout_workers.trainer import LoraConfig, Schedule, Trainer, TrainerConfig, TrainSample

PYTHON = ROOT / ".tools/vllm" / "bin" / "python"
MODEL = ROOT / "models" / "addition"
PROMPTS = ["17+25=", "3+4=", "99+1=", "50+50="]
STEPS = 5


@pytest.fixture(scope="module")
def model() -> Path:
    subprocess.run([sys.executable, str(ROOT / "examples" / "addition" / "prepare.py")], check=True, stdout=subprocess.DEVNULL)
    return MODEL


def trained(model: Path, **settings: object) -> Trainer:
    """A learner whose weights have changed from its model's by training on sums."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    config = TrainerConfig(algorithm="sft", schedule=Schedule(peak=3e-3), threads=1, **settings)  # type: ignore[arg-type]
    learner, draw = Trainer(model, config), random.Random(0)
    for step in range(1, STEPS + 1):
        batch = []
        for row in range(32):
            a, b = draw.randrange(100), draw.randrange(100)
            head, tail = tokenizer(f"{a}+{b}=")["input_ids"], tokenizer(str(a + b))["input_ids"]
            ids = np.array([*head, *tail, tokenizer.eos_token_id], np.int32)
            mask = (np.arange(len(ids)) >= len(head)).astype(np.uint8)
            batch.append(TrainSample(f"0/{row:06d}", 0, ids, len(head), mask, np.zeros(len(ids), np.float32)))
        learner.train_step(batch, step)
    return learner


@pytest.mark.parametrize("settings", [{}, {"lora": LoraConfig(rank=4)}], ids=["weights", "merged adapters"])
def test_a_checkpoint_answers_in_vllm_as_in_transformers(model: Path, tmp_path: Path, settings: dict[str, object]) -> None:
    folder = tmp_path / "weights"
    trained(model, **settings).write_weights(folder)
    (tmp_path / "prompts.json").write_text(json.dumps(PROMPTS))
    command = [
        str(PYTHON),
        str(ROOT / "e2e" / "vllm_peer.py"),
        str(folder),
        *(str(tmp_path / f"{n}.json") for n in ("prompts", "answers")),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]

    plain, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    before = AutoModelForCausalLM.from_pretrained(model)
    for prompt, answer in zip(PROMPTS, json.loads((tmp_path / "answers.json").read_text()), strict=True):
        assert answer["prompt_ids"] == tokenizer(prompt)["input_ids"]
        wanted = logprobs(plain, answer["prompt_ids"], answer["ids"])
        torch.testing.assert_close(torch.tensor(answer["logprobs"]), wanted, atol=1e-3, rtol=0)
        assert (logprobs(before, answer["prompt_ids"], answer["ids"]) - wanted).abs().max() > 0.1  # it is not the initial model


@torch.no_grad()
def logprobs(model: torch.nn.Module, prompt: list[int], ids: list[int]) -> torch.Tensor:
    """float32 [n]: the logprob of each of ``ids`` given the tokens before it."""
    tokens = torch.tensor([prompt + ids])
    every = model(input_ids=tokens).logits[0].log_softmax(-1)
    return every[len(prompt) - 1 : -1].gather(-1, tokens[0, len(prompt) :, None])[:, 0]
