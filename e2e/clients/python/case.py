"""What the Python clients share: their arguments, and a JSON object on a line for each case. It
imports nothing of this repository, because each client has a separate environment."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence

URL, KEY, MODEL, SECONDS = sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])
"""Each case is repeated for SECONDS, at least once."""
RING, STRIDES = 94, 7


def report(client: str, version: str, cases: Sequence[Callable[[], None]]) -> None:
    """Run the cases of a client."""
    for case in cases:
        times, end = 0, time.monotonic() + SECONDS
        error = ""
        try:
            while not times or time.monotonic() < end:
                case()
                times += 1
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            traceback.print_exc()
        print(json.dumps({"client": f"{client} {version}", "case": case.__name__, "times": times, "error": error}), flush=True)


def counted(ids: Sequence[int], spans: Sequence[dict[str, int]]) -> None:
    """Check the weights version of each token of a greedy completion (see `counting.problem`)."""
    assert spans and spans[0]["start"] == 0 and spans[-1]["end"] == len(ids), f"{spans} for {len(ids)} tokens"
    for before, span in zip([{"end": 0}, *spans], spans, strict=False):
        assert before["end"] == span["start"] < span["end"], spans
        for at in range(max(1, span["start"]), span["end"]):
            found = (ids[at] - ids[at - 1]) % RING
            assert found == 1 + span["version"] % STRIDES, f"token {at} of {ids} is not of version {span['version']}: {spans}"


def characters(text: str) -> list[int]:
    """The token ids of a completion that only has characters of the ring."""
    return [ord(character) - ord("!") for character in text]
