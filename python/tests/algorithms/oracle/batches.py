"""Batches on which our losses and those of other projects are compared: from seeds, so both sides make the same.

Shapes: S = 8 samples (4 pairs) of T = 7 places, padded, float32. Needs torch alone.
"""

from __future__ import annotations

from collections.abc import Callable

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


RIGHT = [7, 3, 5, 1, 6, 2, 7, 4]
CASES: dict[str, Callable[[], tuple[Tensor, float]]] = {
    # mask float32 [S, T], scale of the log-ratios
    "random": lambda: (_lengths(RIGHT), 0.3),
    "left padding": lambda: (_lengths(RIGHT, left=True), 0.3),
    "several turns": lambda: (_holes(), 0.3),
    "one token each": lambda: (_lengths([1] * S), 0.3),
    "empty completions": lambda: (_lengths([7, 0, 5, 1, 0, 2, 7, 0]), 0.3),
    "equal rewards": lambda: (_lengths(RIGHT), 0.3),
    "huge ratios": lambda: (_lengths(RIGHT), 6.0),
    "on policy": lambda: (_lengths(RIGHT), 0.0),
}


def batch(case: str) -> Batch:
    """A case as named tensors; logprobs outside the mask are numbers like any other, so what reads them shows."""
    generator = torch.Generator().manual_seed(1000 + list(CASES).index(case))
    mask, scale = CASES[case]()

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    logprobs = -1.5 - 0.5 * draw(S, T).abs()
    rewards = torch.ones(S) if case == "equal rewards" else draw(S)
    values = draw(S, T)
    return {
        "mask": mask,
        "logprobs": logprobs,
        "old": (logprobs + scale * draw(S, T)).clamp(logprobs - 19, logprobs + 19),
        "engine": (logprobs + 1.5 * scale * draw(S, T)).clamp(logprobs - 19, logprobs + 19),
        "reference": logprobs + 0.4 * draw(S, T),
        "entropy": draw(S, T).abs(),
        "advantages": torch.zeros(S) if case == "equal rewards" else draw(S),
        "rewards": rewards,
        "token_rewards": 0.1 * draw(S, T) * mask,
        "values": values,
        "old_values": values + 0.3 * draw(S, T),
        "returns": draw(S, T),
        "logits": draw(S, T, VOCABULARY),
        "labels": torch.randint(0, VOCABULARY, (S, T), generator=generator),
        "scores": draw(S),
        "margins": draw(S // 2).abs(),
        "desirable": torch.tensor([True, False, True, True, False, False, True, False]),
        "mismatched": -3 - draw(S).abs(),
        "mismatched_reference": -3.5 - draw(S).abs(),
    }
