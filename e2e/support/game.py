"""The environment of runs without a model: two to five turns, an observation that depends on the
turn before it, and rewards of turns and episode.

A file named `hang` next to this one makes the process that finds it hang, which blocks its
interpreter.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import ClassVar

from rollout.environment import Observation, Result, SingleEpisode, Task, Turn
from rollout.sandbox import Limits, Sandboxes, Spec

HANG = Path(__file__).with_name("hang")
BOX = Spec(limits=Limits(memory_bytes=64 << 20, pids=8), best_effort=("memory_bytes", "pids", "cpus"))


class Game(SingleEpisode):
    server: ClassVar[Sandboxes | None] = None

    def __init__(self, boxes: bool = False) -> None:
        self.boxes = boxes

    async def reset(self, task: Task) -> str:
        self.turns: list[str] = []
        return json.loads(task.row_json)["prompt"]

    async def step(self, turn: Turn) -> Observation | Result:
        _hang()
        self.turns.append(turn.text)
        assert len(self.turns) == turn.number + 1, f"turn {turn.number} follows {len(self.turns) - 1} turns"
        count = sum(c.isalpha() for text in self.turns for c in text)
        if self.boxes:
            count = await _doubled(count)
        if turn.number == 1 + turn.seed % 4:
            return Result(reward=float(count), metrics={"turns": len(self.turns)})
        return Observation(text=f"[{count}]", reward=len(turn.text) / 8)


def _hang() -> None:
    try:
        HANG.rename(HANG.with_name("hung"))  # only one process hangs
    except FileNotFoundError:
        return
    while True:
        time.sleep(60)


async def _doubled(count: int) -> int:
    """Twice the number, by a command in a box. Raises if the command was killed."""
    if Game.server is None:
        Game.server = await Sandboxes().__aenter__()
    result = await Game.server.run(BOX, ["sh", "-c", f"sleep 0.02; echo $(({count} * 2))"])
    if not result.ok:
        raise RuntimeError(f"the command ended as {result.reason}")
    return int(result.stdout)
