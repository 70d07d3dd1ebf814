"""What bounds an episode, and which tokens its rewards count for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rollout.algorithm import turns
from rollout.config.v1.run_config_pb2 import RunConfig
from rollout.environment import Result
from rollout_workers.rewards.process_reward import NOTHING

Credit = Literal["episode", "turn", "token"]
_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of ``[environment]``. The defaults limit nothing.

    name: of the environment, in messages. turns: whether episodes may have several turns.
    max_tokens: of an episode, prompt, observations, and child sessions included. context: tokens of
    an episode without its child sessions, and of a child session. seconds: of a step, an episode,
    and a group.
    """

    name: str = "the environment"
    turns: bool = False
    max_turns: int = 1 << 30
    max_tokens: int = 1 << 30
    context: int = 1 << 30
    max_children: int = 0
    turn_seconds: float = _NEVER
    episode_seconds: float = _NEVER
    group_seconds: float = _NEVER
    credit: Credit = "token"

    @classmethod
    def of(cls, config: RunConfig) -> Limits:
        """The limits of a run. Those of single turns are in the reward."""
        if not turns(config):
            return cls()
        environment, context = config.environment, config.engine.max_model_len
        return cls(
            name=environment.path or environment.kind,
            turns=True,
            max_turns=environment.max_turns,
            max_tokens=environment.max_episode_tokens or context,
            context=context,
            max_children=environment.max_child_sessions,
            turn_seconds=environment.turn_timeout_seconds,
            episode_seconds=environment.episode_timeout_seconds,
            group_seconds=environment.group_timeout_seconds or _NEVER,
            credit=environment.credit,  # type: ignore[arg-type]
        )


def credited(result: Result, spans: list[tuple[int, int]], rewards: list[float], credit: Credit) -> Result:
    """The result of an episode with its rewards where they count.

    spans: of each turn, its first token and one past the last, in the completion. rewards: of each
    turn. The completion ends with the last turn.

    ``episode``: ``reward`` is the sum of all. ``turn``: ``token_rewards`` has the reward of a turn
    at its last token, and ``reward`` is that of the episode. ``token``: as ``turn``, and the token
    rewards of the result are where they are.
    """
    rewards = [a + b for a, b in zip(rewards, result.turn_rewards or [0.0] * len(rewards), strict=True)]
    own = sum(result.token_rewards)
    if credit == "episode":
        return replace(result, reward=result.reward + sum(rewards) + own, token_rewards=(), turn_rewards=())
    by_token = np.zeros(spans[-1][1] if spans else 0, np.float64)
    if credit == "token" and result.token_rewards:
        by_token[spans[-1][0] : spans[-1][1]] = result.token_rewards
    elif rewards:
        rewards[-1] += own
    for (start, end), reward in zip(spans, rewards, strict=True):
        if end > start:
            by_token[end - 1] = by_token[end - 1] + reward or NOTHING
    return replace(result, token_rewards=tuple(by_token.tolist()), turn_rewards=())
