"""One prompt, one completion, one reward."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_workers.harness.environment import Observation, Refusal, Result, Task, Turn
from rollout_workers.harness.prompts import PromptInvalid, PromptReader
from rollout_workers.harness.rewards import RewardGroup, Rewards


class SingleTurn:
    """The environment that ends every episode after its first turn. It keeps no state of episodes."""

    def __init__(self, prompts: PromptReader, rewards: Rewards) -> None:
        self._prompts, self._rewards = prompts, rewards

    async def reset(self, tasks: Sequence[Task]) -> list[Observation | Refusal]:
        """The prompt of each task's row."""
        read = self._prompts.read([task.row_json for task in tasks])
        return [Refusal(p.reason, str(p)) if isinstance(p, PromptInvalid) else Observation(p.token_ids, p.text) for p in read]

    async def step(self, turns: Sequence[Turn]) -> list[Observation | Result]:
        """The reward of each turn; turns of one task that come together are scored in one group."""
        places: dict[str, list[int]] = {}
        for place, turn in enumerate(turns):
            places.setdefault(turn.task.key, []).append(place)
        groups = [
            RewardGroup(turns[at[0]].task.row_json, tuple((turns[i].prompt, turns[i].text) for i in at)) for at in places.values()
        ]
        results: list[Observation | Result] = [Result()] * len(turns)
        for at, scored in zip(places.values(), await self._rewards.score(groups), strict=True):
            for i, result in zip(at, scored, strict=True):
                results[i] = result
        return results

    async def close(self, episodes: Sequence[tuple[str, int]]) -> None:
        """Nothing to forget."""
