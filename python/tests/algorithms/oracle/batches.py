"""Batches on which our losses and those of other projects are compared: from seeds, so both sides
make the same.

Shapes: S = 8 samples (4 pairs) of T = 7 places, padded, float32. Needs torch alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

S, T, VOCABULARY = 8, 7, 11
GROUPS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
Batch = dict[str, Tensor]


def _lengths(lengths: list[int], *, left: bool = False) -> Tensor:
    place = torch.arange(T).expand(S, T)
    size = torch.tensor(lengths)[:, None]
    return (place >= T - size if left else place < size).float()


def _holes() -> Tensor:
    mask = _lengths([7, 6, 7, 5, 7, 4, 6, 7])
    mask[::2, 2:4] = 0  # a tool's answer between two turns
    return mask


@dataclass(frozen=True)
class Case:
    """What a batch is like."""

    mask: Callable[[], Tensor] = lambda: _lengths(RIGHT)
    """float32 [S, T]."""
    scale: float = 0.3
    """Of the log-ratios of a token to the old policy; to the engine's half as much again."""
    bound: float = 19.0
    """Of those, in nats either way."""
    far: float = 1.0
    """How much further off than is usual the reference, scores, margins, values and returns lie."""


RIGHT = [7, 3, 5, 1, 6, 2, 7, 4]
CASES: dict[str, Case] = {
    "random": Case(),
    "left padding": Case(lambda: _lengths(RIGHT, left=True)),
    "several turns": Case(_holes),
    "one token each": Case(lambda: _lengths([1] * S)),
    "empty completions": Case(lambda: _lengths([7, 0, 5, 1, 0, 2, 7, 0])),
    "equal rewards": Case(),
    "huge ratios": Case(scale=6.0),
    "on policy": Case(scale=0.0),
    "far reference": Case(far=20.0),
    "all far off": Case(scale=6.0, far=30.0),
    "out of bounds": Case(scale=20.0, bound=40.0, far=60.0),
}


def batch(case: str) -> Batch:
    """A case as named tensors; logprobs outside the mask are numbers like any other, so what reads
    them shows."""
    generator = torch.Generator().manual_seed(1000 + list(CASES).index(case))
    of = CASES[case]
    mask, scale, bound, far = of.mask(), of.scale, of.bound, of.far

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    logprobs = -1.5 - 0.5 * draw(S, T).abs()
    rewards = torch.ones(S) if case == "equal rewards" else draw(S)
    values = far * draw(S, T)
    return {
        "mask": mask,
        "logprobs": logprobs,
        "old": (logprobs + scale * draw(S, T)).clamp(logprobs - bound, logprobs + bound),
        "engine": (logprobs + 1.5 * scale * draw(S, T)).clamp(logprobs - bound, logprobs + bound),
        "reference": (logprobs + 0.4 * far * draw(S, T)).clamp(logprobs - bound, logprobs + bound),
        "entropy": draw(S, T).abs(),
        "advantages": torch.zeros(S) if case == "equal rewards" else draw(S),
        "rewards": rewards,
        "token_rewards": 0.1 * draw(S, T) * mask,
        "values": values,
        "old_values": values + 0.3 * far * draw(S, T),
        "returns": far * draw(S, T),
        "logits": draw(S, T, VOCABULARY),
        "labels": torch.randint(0, VOCABULARY, (S, T), generator=generator),
        "scores": far * draw(S),
        "margins": far * draw(S // 2).abs(),
        "desirable": torch.tensor([True, False, True, True, False, False, True, False]),
        "mismatched": -3 - far * draw(S).abs(),
        "mismatched_reference": -3.5 - far * draw(S).abs(),
    }
