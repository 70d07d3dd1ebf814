"""Environments and rewards of the examples in which an episode gets the reward of an earlier one,
chosen at random. What the policy does no longer changes what it gets, so it must not improve.
Held-out rows (``"held_out": true``) keep their rewards, for evaluations.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollout.environment import Observation, Result, SingleEpisode, Turn
from rollout.environments.dialogs import Verifiers
from rollout.environments.procedural import ReasoningGym
from rollout.environments.vector import Gymnasium
from rollout.plugin import Sample

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


class Pool:
    """The last rewards; ``swap`` takes one in and returns one of them."""

    def __init__(self) -> None:
        self._kept: deque[float] = deque(maxlen=512)
        self._draw = random.Random(0)

    def swap(self, reward: float) -> float:
        self._kept.append(reward)
        return self._draw.choice(self._kept)


TURNS, EPISODES = Pool(), Pool()


def shuffle(answer: Any, turn: Turn) -> Any:
    """The same answer with another reward."""
    if json.loads(turn.task.row_json).get("held_out"):
        return answer
    if isinstance(answer, Observation):
        return replace(answer, reward=TURNS.swap(answer.reward))
    return replace(answer, reward=EPISODES.swap(answer.reward)) if isinstance(answer, Result) else answer


def example(path: str, name: str) -> Any:
    """A class or a function of an example's file."""
    spec = importlib.util.spec_from_file_location(f"shuffled_{name}", EXAMPLES / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


class ShuffledGuess(SingleEpisode):
    """The guessing game."""

    def __init__(self, **arguments: Any) -> None:
        self._game = example("environments/guess.py", "Guess")(**arguments)

    async def reset(self, task: Any) -> Any:
        return await self._game.reset(task)

    async def step(self, turn: Turn) -> Any:
        return shuffle(await self._game.step(turn), turn)


class ShuffledGymnasium(Gymnasium):
    """An environment of gymnasium."""

    async def step(self, turns: Sequence[Turn]) -> list[Any]:
        return [shuffle(answer, turn) for answer, turn in zip(await super().step(turns), turns, strict=True)]


class ShuffledReasoningGym(ReasoningGym):
    """A dataset of reasoning-gym."""

    def step(self, turn: Turn) -> Result:
        return shuffle(super().step(turn), turn)


class ShuffledVerifiers(Verifiers):
    """An environment of verifiers."""

    async def step(self, turns: Sequence[Turn]) -> list[Any]:
        return [shuffle(answer, turn) for answer, turn in zip(await super().step(turns), turns, strict=True)]


def exact(samples: Sequence[Sample]) -> list[float]:
    """The reward of the calculator example and of the MCP example."""
    rewards = example("tools/calculator.py", "exact")(samples)
    return [
        reward if sample.row.get("held_out") else EPISODES.swap(reward) for sample, reward in zip(samples, rewards, strict=True)
    ]
