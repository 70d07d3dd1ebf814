"""Process rewards: what parts of a completion are worth, laid on its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollout.plugin import Step

NOTHING = 1e-30
"""What stands for the reward of a step that earned 0: too little to count in a sum, and not the 0
of tokens that end none."""


def spread(steps: Sequence[Step], tokens: int, text_of: Callable[[int], str]) -> tuple[float, ...]:
    """The reward of each token. A step's reward is on the token that completes it (``NOTHING`` for
    0). ``tokens`` floats.

    text_of: text of the first n tokens. Example: tokens ``3 * 4`` | `` = 12`` and a step of 7
    characters: (0.0, reward).
    """
    rewards = [0.0] * tokens
    for step in steps:
        low, high = 1, tokens
        while low < high:  # the fewest tokens whose text reaches the end of the step
            middle = (low + high) // 2
            if len(text_of(middle)) >= step.end:
                high = middle
            else:
                low = middle + 1
        if tokens:
            rewards[low - 1] = rewards[low - 1] + step.reward or NOTHING
    return tuple(rewards)
