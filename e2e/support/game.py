"""The environment of runs without a model: two to five turns, an observation that depends on the
turn before it, and rewards of turns and episode.

A file named `hang` next to this one makes the process that finds it hang, which blocks its
interpreter.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import ClassVar

from rollout.environment import Observation, Result, SingleEpisode, Task, Turn
from rollout.sandbox import Limits, Sandboxes, Spec

HANG = Path(__file__).with_name("hang")
WAIT, PLAYED = Path(__file__).with_name("wait"), Path(__file__).with_name("played")
BOX = Spec(limits=Limits(memory_bytes=64 << 20, pids=8), best_effort=("memory_bytes", "pids", "cpus"))


class Game(SingleEpisode):
    server: ClassVar[Sandboxes | None] = None

    def __init__(self, boxes: bool = False, helpers: bool = False) -> None:
        self.boxes, self.helpers = boxes, helpers

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
        if self.helpers and turn.number == 0:
            count += await self._helped(turn)
        if turn.number == 1 + turn.seed % 4:
            return Result(reward=float(count), metrics={"turns": len(self.turns)})
        return Observation(text=f"({count})", reward=len(turn.text) / 8)

    async def _helped(self, turn: Turn) -> int:
        """The letters that one to three helpers say at the same time. The first is asked again, and
        has its own reward."""
        helpers = [self.sessions.open() for _ in range(1 + turn.seed % 3)]
        replies = await asyncio.gather(*(helper.chat(f"help {helper.number} with {turn.text}:") for helper in helpers))
        replies.append(await helpers[0].chat("more:"))
        helpers[0].reward = len(replies[0].text) / 8
        return sum(c.isalpha() for reply in replies for c in reply.text)


class SavedGame(Game):
    """A game whose episodes can be saved. It records each turn in `played` next to this file, and
    waits before the second turn while there is a file `wait`."""

    async def step(self, turn: Turn) -> Observation | Result:
        while turn.number == 1 and WAIT.exists():
            await asyncio.sleep(0.02)
        with PLAYED.open("a") as played:
            played.write(json.dumps([turn.task.row, turn.sample, turn.number, turn.text]) + "\n")
        return await super().step(turn)

    def state_dict(self) -> dict[str, list[str]]:
        return {"turns": self.turns}

    def load_state_dict(self, state: dict[str, list[str]]) -> None:
        self.turns = list(state["turns"])


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
