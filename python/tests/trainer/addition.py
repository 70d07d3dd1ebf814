"""The addition example as test data: its model, small, and batches of sums."""

from __future__ import annotations

import random
import runpy
from pathlib import Path

import numpy as np

from rollout_workers.trainer import TrainSample

EXAMPLE = Path(__file__).parents[3] / "examples" / "addition"
CODES = {character: 3 + number for number, character in enumerate("0123456789+-*/=")}
END = 1


def prepare_model(folder: Path, *, layers: int = 2, hidden: int = 32, seed: int = 0) -> Path:
    """Write a small model of the example's kind and return its folder."""
    runpy.run_path(str(EXAMPLE / "prepare.py"))["write_model"](folder, layers=layers, hidden=hidden, seed=seed)
    return folder


def answer(group: int, sample: int, prompt: str, completion: str, reward: float, *, logprob: float = -1.0) -> TrainSample:
    """A sample of a group, whose completion and end of sequence are trained on."""
    tokens = [CODES[character] for character in prompt + completion] + [END]
    mask = np.array([0] * len(prompt) + [1] * (len(completion) + 1), np.uint8)
    return TrainSample(
        group_key=f"0/{group:06d}",
        sample=sample,
        token_ids=np.array(tokens, np.int32),
        prompt_length=len(prompt),
        loss_mask=mask,
        logprobs=(logprob * mask).astype(np.float32),
        reward=reward,
        version=0,
    )


def sampled_batch(seed: int, *, groups: int = 6, size: int = 4) -> list[TrainSample]:
    """GRPO groups with wrong and right answers; every third group has equal rewards."""
    draw = random.Random(seed)
    samples = []
    for group in range(groups):
        a, b = draw.randrange(100), draw.randrange(100)
        for sample in range(size):
            right = group % 3 == 0 or draw.random() < 0.5
            completion = str(a + b if right else draw.randrange(200))
            samples.append(answer(group, sample, f"{a}+{b}=", completion, float(right)))
    return samples


def demonstrations(seed: int, *, rows: int = 16) -> list[TrainSample]:
    """Right answers for SFT."""
    draw = random.Random(seed)
    pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(rows)]
    return [answer(row, 0, f"{a}+{b}=", str(a + b), 0.0, logprob=0.0) for row, (a, b) in enumerate(pairs)]
