"""Rewards in processes of their own.

A reward is the user's code: it may hang, crash, print, or hold the interpreter for seconds. In its own process none of that
reaches the sampling loop, and a call that takes too long is ended for good. Expressions are evaluated there too: one that is
slow slows nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from rollout.plugin import Score
from rollout_workers.rewards.client import RewardProcess
from rollout_workers.rewards.rewards import RewardGroup

_PROCESSES = 4


class RewardPool:
    """A :class:`RewardSource`: as many processes as calls overlap, at most four."""

    def __init__(self, reward: Mapping[str, str]) -> None:
        """reward: what :meth:`RewardProcess.start` takes."""
        self._reward = reward
        self._idle: list[RewardProcess] = []
        self._slots = asyncio.Semaphore(_PROCESSES)

    async def start(self) -> None:
        """Start one process and load the reward. Raises ``RewardError``."""
        self._idle.append(await RewardProcess.start(self._reward))

    async def call(self, groups: Sequence[RewardGroup], timeout: float) -> list[Score]:
        """One call of the function over all samples. Raises ``RewardError``."""
        async with self._slots:
            process = self._idle.pop() if self._idle else await RewardProcess.start(self._reward)
            try:
                return await process.call(
                    [(g.row_json, [(s.prompt, s.completion, s.token_ids) for s in g.samples]) for g in groups], timeout
                )
            except BaseException:
                if process.broken:
                    process.kill()
                raise
            finally:
                if not process.broken:
                    self._idle.append(process)

    async def close(self) -> None:
        """Kill the processes."""
        for process in self._idle:
            process.kill()
        self._idle.clear()
