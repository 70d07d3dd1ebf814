"""A taskset of `verifiers` 0.4 for `verifiers04_player.py`: the opening of the guessing game. The
reward is the share of digits in the answer."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf


class GuessingTask(vf.Task):
    @vf.reward
    async def digits(self, trace: vf.Trace) -> float:
        said = trace.nodes[-1].message.content or ""
        return sum(character.isdecimal() for character in said) / max(1, len(said))


class GuessingTaskset(vf.Taskset[GuessingTask]):
    def load(self) -> Iterable[GuessingTask]:
        yield GuessingTask(vf.TaskData(prompt="guess 1-5:"), self.config.task)


__all__ = ["GuessingTaskset"]
