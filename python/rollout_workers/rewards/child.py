"""The process that holds a reward: ``python -m rollout_workers.rewards.child``. Imports only what the reward imports.

Stdin is a socket to the worker: requests come in and answers go out, each as eight bytes of length and a pickle. What the
reward prints goes to the worker's log. When the socket ends the process ends, even inside a call.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import struct
import sys
import threading
from array import array
from typing import Any, BinaryIO

from rollout.plugin import RewardFunction, Sample, Score, call_reward, load_reward

_LENGTH = struct.Struct("<Q")


def main() -> None:
    """Answer requests until the socket ends. The first one names the plugin or holds the expression."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(0), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, arrived), daemon=True).start()
    function: RewardFunction | None = None
    while True:
        request = arrived.get()
        try:
            if function is None:
                function = _load(request)
                answer: dict[str, Any] = {"value": None}
            else:
                answer = {"value": _score(function, request)}
        except Exception as error:
            answer = {"error": getattr(error, "reason", "REWARD_RAISED"), "message": str(error)}
        sys.stdout.flush()
        body = pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
        answers.write(_LENGTH.pack(len(body)) + body)
        answers.flush()


def _load(request: dict[str, str]) -> RewardFunction:
    if "expression" not in request:
        return load_reward(request["plugin"], request["base_dir"])
    from rollout.expression import Expression

    return Expression(request["expression"])


def _score(function: RewardFunction, groups: Any) -> list[Score]:
    samples: list[Sample] = []
    for row_json, scorables in groups:
        row = json.loads(row_json)
        samples.extend(Sample(prompt, completion, row, array("i", ids)) for prompt, completion, ids in scorables)
    return _shared(call_reward(function, samples))


def _shared(scores: list[Score]) -> list[Score]:
    """The same scores, those that are nothing but the same number as one object: on the way it is one, too."""
    known: dict[str, Score] = {}
    plain = [not (s.metrics or s.token_rewards or s.steps) for s in scores]
    return [known.setdefault(s.reward.hex(), s) if p else s for s, p in zip(scores, plain, strict=True)]


def _read(pipe: BinaryIO, arrived: queue.SimpleQueue[Any]) -> None:
    """Take requests until the socket ends, be it in the middle of one, and end the process then."""
    try:
        while len(head := pipe.read(_LENGTH.size)) == _LENGTH.size:
            (size,) = _LENGTH.unpack(head)
            if len(body := pipe.read(size)) < size:
                return
            arrived.put(pickle.loads(body))
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
