"""A policy whose text shows the weights version of each token: it counts through the printable
characters, and the step from one to the next depends on the version. So `weight_versions` can be
checked with the token ids alone."""

from __future__ import annotations

from collections.abc import Sequence

RING = 94
"""Tokens 0 to 93 are the characters from ! to ~."""
STRIDES = 7
MAX_LEN = 2048


def stride(version: int) -> int:
    """How far the policy counts with each token."""
    return 1 + version % STRIDES


def problem(ids: Sequence[int], spans: Sequence[dict[str, int]]) -> str:
    """What is wrong with the spans of a greedy completion; empty: nothing. The first token has no
    predecessor to compare with."""
    if (
        not spans
        or [span["start"] for span in spans] != [0, *(span["end"] for span in spans[:-1])]
        or spans[-1]["end"] != len(ids)
    ):
        return f"the spans {spans} do not cover {len(ids)} tokens"
    for span in spans:
        for at in range(max(1, span["start"]), span["end"]):
            if (ids[at] - ids[at - 1]) % RING != stride(span["version"]):
                return f"token {at} of {ids} was not sampled by version {span['version']}: the spans are {spans}"
    return ""
