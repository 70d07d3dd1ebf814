"""The environment for one prompt, one completion, and one reward."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from rollout.algorithm import name_of, traits
from rollout.environment import Observation, Refusal, Result, Task, Turn, failed
from rollout_workers.data.prompts import PromptInvalid, PromptReader, Text
from rollout_workers.environments.registry import Context
from rollout_workers.rewards.process_reward import spread
from rollout_workers.rewards.rewards import RewardGroup, Scorable, Scorer

log = logging.getLogger(__name__)


def build(context: Context) -> SingleTurn:
    """Build the environment for the registry."""
    trains = context.config.algorithm.WhichOneof("kind") is not None
    takes = not trains or traits(name_of(context.config)).token_rewards
    return SingleTurn(context.prompts, context.rewards, context.text, takes_token_rewards=takes)


class SingleTurn:
    """Ends every episode after its first turn. It keeps no state of episodes."""

    def __init__(self, prompts: PromptReader, rewards: Scorer | None, text: Text, *, takes_token_rewards: bool = True) -> None:
        """rewards: None if nothing is scored (distillation); every reward is then 0.

        takes_token_rewards: whether the algorithm can use rewards of parts of a completion. If it
        can't, a sample with such rewards is INFRA_FAILED with REWARD_BAD_RESULT, because a part of
        its reward would be lost.
        """
        self._prompts, self._rewards, self._text, self._takes = prompts, rewards, text, takes_token_rewards
        self._warned = False

    async def reset(self, tasks: Sequence[Task]) -> list[Observation | Refusal]:
        """The prompt of each task's row."""
        read = self._prompts.read([task.row_json for task in tasks])
        return [Refusal(p.reason, str(p)) if isinstance(p, PromptInvalid) else Observation(p.token_ids, p.text) for p in read]

    async def step(self, turns: Sequence[Turn]) -> list[Observation | Result]:
        """The reward of each turn. Turns of one task in the same call are scored in one group."""
        places: dict[str, list[int]] = {}
        for place, turn in enumerate(turns):
            places.setdefault(turn.task.key, []).append(place)
        if self._rewards is None:
            return [Result()] * len(turns)
        groups = [self._group([turns[i] for i in at]) for at in places.values()]
        results: list[Observation | Result] = [Result()] * len(turns)
        for at, scored in zip(places.values(), await self._rewards.score(groups), strict=True):
            for i, result in zip(at, scored, strict=True):
                results[i] = self._by_token(result, turns[i])
        return results

    async def close(self, episodes: Sequence[tuple[str, int]]) -> None:
        """Do nothing, because episodes have no state."""

    def _group(self, turns: Sequence[Turn]) -> RewardGroup:
        prompt = turns[0].prompt_ids.tobytes()
        return RewardGroup(
            turns[0].task.row_json, tuple(Scorable(t.prompt, t.text, prompt, t.token_ids.tobytes()) for t in turns)
        )

    def _by_token(self, result: Result, turn: Turn) -> Result:
        """The result with its step rewards spread over the completion's tokens."""
        if not result.token_rewards and not result.steps:
            return result
        if not self._takes:
            if not self._warned:
                log.warning(
                    "this algorithm can't use rewards of parts of a completion: samples with such rewards are INFRA_FAILED"
                )
            self._warned = True
            return failed("REWARD_BAD_RESULT")
        rewards = spread(result.steps, len(turn.token_ids), lambda n: self._text.decode([turn.token_ids[:n]])[0])
        if result.token_rewards:
            rewards = tuple(a + b for a, b in zip(rewards, result.token_rewards, strict=True))
        metrics = {**result.metrics, "reward/parts": sum(rewards)}
        return replace(result, metrics=metrics, token_rewards=rewards, steps=())
