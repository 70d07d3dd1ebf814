"""Environments of gymnasium, played in text: the policy reads the observation and writes the
action."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollout.environment import Observation, Refusal, Result, Task, Turn
from rollout.environments import ArgumentInvalid, PackageMissing

_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


class Gymnasium:
    """Each task is a vector environment of gymnasium with one place for each sample. All places
    begin with the seed of the row, so that the samples have the same first observation. A step of
    the vector environment waits for the actions of all episodes of the task that are open. The
    place of an episode that has ended may be reset by the vector environment (in either autoreset
    mode); what happens there is ignored.

    id: of the environment, ``module:Name-v0`` to import a module first. kwargs: of
    ``gymnasium.make_vec``, among them those of the environment. vectorization: ``sync``, ``async``
    or ``vector_entry_point``; by default the first. autoreset: ``next_step``, ``same_step`` or
    ``disabled``.

    prompt: text around ``{observation}`` at the start. actions: names of the actions of a discrete
    space, in order; without them the policy writes numbers. render: shows ``render()`` in place of
    the observation, for environments with ``render_mode="ansi"``. invalid_reward: of a turn without
    a valid action, which the policy then repeats.
    """

    batched = False  # a turn must not wait for the answers to others, which may wait for its action
    waits_for_siblings = True

    def __init__(
        self,
        id: str,
        kwargs: Mapping[str, Any] | None = None,
        vectorization: str = "sync",
        autoreset: str = "next_step",
        prompt: str = "{observation}",
        actions: Sequence[str] = (),
        render: bool = False,
        invalid_reward: float = 0.0,
    ) -> None:
        try:
            gymnasium: Any = importlib.import_module("gymnasium")
        except ImportError as error:
            raise PackageMissing("gymnasium", error) from error
        self._gym = gymnasium
        if "{observation}" not in prompt:
            raise ArgumentInvalid(f"`prompt = {prompt!r}` has no place for the observation", fix="write {observation} in it")
        modes: dict[str, Any] = {mode.name.lower(): mode for mode in gymnasium.vector.AutoresetMode}
        if autoreset not in modes:
            raise ArgumentInvalid(f"`autoreset = {autoreset!r}` is unknown", fix=f"write one of {', '.join(modes)}")
        self._id, self._vectorization, self._autoreset = id, vectorization, modes[autoreset]
        self._kwargs = dict(kwargs or {}) | ({"render_mode": "ansi"} if render else {})
        self._prompt, self._actions, self._render = prompt, list(actions), render
        self._invalid_reward = invalid_reward
        self._vectors: dict[str, _Vector] = {}
        probe = self._make(1)  # so that the plan reports an unknown id or wrong arguments
        space, count = probe.single_action_space, len(self._actions)
        probe.close()
        if count and (not isinstance(space, gymnasium.spaces.Discrete) or int(space.n) != count):
            raise ArgumentInvalid(f"`actions` names {count} actions of {space}", fix="name each action of a discrete space")

    async def reset(self, tasks: Sequence[Task]) -> list[Observation | Refusal]:
        """Begin the episodes of each task. ``seed`` in the row selects the episode, ``options``
        are gymnasium's."""
        return [await self._begin(task) for task in tasks]

    async def step(self, turns: Sequence[Turn]) -> list[Observation | Result]:
        """The observations after the actions of these turns."""
        return list(await asyncio.gather(*(self._answer(turn) for turn in turns)))

    async def close(self, episodes: Sequence[tuple[str, int]]) -> None:
        """End these episodes; their places are ignored from now on."""
        for key, sample in episodes:
            if (vector := self._vectors.get(key)) is not None:
                self._end(key, vector, sample)

    async def _begin(self, task: Task) -> Observation | Refusal:
        await self.close([(task.key, sample) for sample in (self._vectors[task.key].places if task.key in self._vectors else ())])
        row: Any = json.loads(task.row_json or b"{}")
        seed: Any = row.get("seed")
        if not isinstance(seed, int) or not 0 <= seed < 1 << 31:
            return Refusal("ROW_INVALID", f"`seed` is {seed!r}, not a number from 0 to 2147483647")
        count = len(task.samples)
        envs = self._make(count)
        observations, _ = envs.reset(seed=[seed] * count, options=row.get("options"))
        self._vectors[task.key] = _Vector(envs, {sample: place for place, sample in enumerate(task.samples)})
        return Observation(text=self._prompt.replace("{observation}", self._shown(envs, observations, 0)))

    async def _answer(self, turn: Turn) -> Observation | Result:
        vector = self._vectors[turn.task.key]
        action = self._action(turn.content, vector.envs.single_action_space)
        if action is None:
            expected = " or ".join(self._actions) if self._actions else str(vector.envs.single_action_space)
            return Observation(
                text=f"That is not an action. Write one of: {expected}.",
                reward=self._invalid_reward,
                metrics={"invalid_actions": 1.0},
            )
        waiting = asyncio.get_running_loop().create_future()
        vector.waiting[turn.sample] = action, waiting
        self._advance(turn.task.key, vector)
        return await waiting

    def _advance(self, key: str, vector: _Vector) -> None:
        """Step the vector environment if every open episode has an action."""
        if not vector.places or vector.waiting.keys() < vector.places.keys():
            return
        waiting, vector.waiting = vector.waiting, {}
        envs = vector.envs
        actions: list[Any] = [_zero(envs.single_action_space)] * envs.num_envs
        for sample, (action, _) in waiting.items():
            actions[vector.places[sample]] = action
        try:
            if self._autoreset.name == "DISABLED" and vector.ended.any():
                envs.reset(options={"reset_mask": vector.ended})
            space = envs.single_action_space
            batched = (
                np.stack([np.asarray(action, space.dtype) for action in actions]) if space.shape is not None else tuple(actions)
            )
            observations, rewards, terminated, truncated, _ = envs.step(batched)
        except Exception as error:
            for _, future in waiting.values():
                if not future.done():
                    future.set_exception(error)
            return
        vector.ended = np.logical_or(terminated, truncated)
        for sample, (_, future) in waiting.items():
            place = vector.places[sample]
            reward = float(rewards[place])
            answer: Observation | Result
            if terminated[place] or truncated[place]:
                answer = Result(reward=reward, outcome="completed" if terminated[place] else "truncated")
                self._end(key, vector, sample)
            else:
                answer = Observation(text=self._shown(envs, observations, place), reward=reward)
            if not future.done():
                future.set_result(answer)

    def _end(self, key: str, vector: _Vector, sample: int) -> None:
        vector.places.pop(sample, None)
        if (entry := vector.waiting.pop(sample, None)) is not None:
            entry[1].cancel()
        if not vector.places:
            vector.envs.close()
            self._vectors.pop(key, None)
        elif vector.waiting:
            self._advance(key, vector)

    def _make(self, count: int) -> Any:
        try:
            return self._gym.make_vec(
                self._id, num_envs=count, vectorization_mode=self._vectorization,
                vector_kwargs={} if self._vectorization == "vector_entry_point" else {"autoreset_mode": self._autoreset},
                **self._kwargs,
            )  # fmt: skip
        except (self._gym.error.Error, TypeError, ImportError, ValueError) as error:
            raise ArgumentInvalid(f"gymnasium can't make {self._id!r}: {error}", fix="correct `[environment.args]`") from error

    def _shown(self, envs: Any, observations: Any, place: int) -> str:
        if self._render:
            return str(envs.render()[place]).strip("\n")
        named = hasattr(observations, "items")  # a space with several parts
        value: Any = {name: part[place] for name, part in observations.items()} if named else observations[place]
        kind = value.dtype.kind if hasattr(value, "dtype") else ""
        if kind == "f" and np.ndim(value):
            return np.array2string(value, precision=3, suppress_small=True, separator=", ")
        return str(value.tolist() if kind else value)

    def _action(self, text: str, space: Any) -> Any:
        """The action in the text; None without a valid one."""
        spaces = self._gym.spaces
        if self._actions:
            said = _WORD.findall(text.lower())
            found = [at for at, name in enumerate(self._actions) if (words := _WORD.findall(name.lower())) == said[-len(words) :]]
            best = max(found, key=lambda at: len(self._actions[at]), default=None)  # "go up" is not "up"
            return None if best is None else best + int(space.start)
        if isinstance(space, spaces.Text):
            return text if space.contains(text) else None
        numbers = _NUMBER.findall(text)
        if isinstance(space, spaces.Discrete):
            with contextlib.suppress(ValueError, IndexError):
                if space.contains(action := int(numbers[-1])):
                    return action
            return None
        size = math.prod(space.shape)
        if len(numbers) < size:
            return None
        action = np.asarray([float(number) for number in numbers[-size:]], space.dtype).reshape(space.shape)
        return action if space.contains(action) else None


@dataclass(slots=True, eq=False)
class _Vector:
    """places: of the open episodes, sample -> index. waiting: the actions of this step. ended:
    bool[num_envs], whose last step ended an episode."""

    envs: Any
    places: dict[int, int]
    waiting: dict[int, tuple[Any, asyncio.Future[Observation | Result]]] = field(
        default_factory=dict[int, tuple[Any, "asyncio.Future[Observation | Result]"]]
    )
    ended: Any = field(init=False)

    def __post_init__(self) -> None:
        self.ended = np.zeros(self.envs.num_envs, bool)


def _zero(space: Any) -> Any:
    """An action for a place whose episode has ended."""
    if hasattr(space, "start") and space.shape == ():
        return int(space.start)
    if space.shape is not None and space.dtype is not None and np.issubdtype(space.dtype, np.number):
        low = getattr(space, "low", None)
        return np.zeros(space.shape, space.dtype) if low is None else np.clip(np.zeros(space.shape, space.dtype), low, space.high)
    return space.sample()
