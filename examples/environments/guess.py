"""A guessing game for many-turn episodes: the policy has three guesses, and each answer is a hint.
With its last two methods, open episodes are saved after each turn."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rollout.environment import Result, SingleEpisode, Task, Turn


class Guess(SingleEpisode):
    def __init__(self, guesses: int = 3) -> None:
        self.guesses = guesses

    async def reset(self, task: Task) -> str:
        self.number = json.loads(task.row_json)["number"]
        return "guess 1-5:"

    async def step(self, turn: Turn) -> str | Result:
        if not turn.text.isdecimal() or int(turn.text) == self.number or turn.number + 1 == self.guesses:
            return Result(reward=float(turn.text == str(self.number)), metrics={"guesses": turn.number + 1})
        return "higher:" if self.number > int(turn.text) else "lower:"

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.number = state["number"]
