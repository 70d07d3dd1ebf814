"""Process rewards: assigns the rewards of parts of a completion to tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollout.plugin import Step

NOTHING = 1e-30
"""The token reward of a step that earned 0. It is too small to change a sum, and differs from the 0
of tokens that do not complete a step."""


def spread(steps: Sequence[Step], tokens: int, text_of: Callable[[int], str]) -> tuple[float, ...]:
    """The reward of each token, as ``tokens`` floats. The reward of a step is on the token that
    completes it (``NOTHING`` for 0).

    text_of: text of the first n tokens. Example: tokens ``3 * 4`` | `` = 12`` and a step of 7
    characters: (0.0, reward).
    """
    rewards = [0.0] * tokens
    for step in steps:
        low, high = 1, tokens
        while low < high:  # the smallest number of tokens whose text reaches the end of the step
            middle = (low + high) // 2
            if len(text_of(middle)) >= step.end:
                high = middle
            else:
                low = middle + 1
        if tokens:
            rewards[low - 1] = rewards[low - 1] + step.reward or NOTHING
    return tuple(rewards)
