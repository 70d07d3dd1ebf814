"""The environments of one rollout rank on an environment rank, in which it plays whole episodes.

Unlike :class:`EnvironmentRank`, it resets an environment only on command of the rollout rank, with
a seed of the episode, so that an episode depends on its seed and the weights alone.

A command of the rollout rank is a dict: ``sender``, a text that is new with each process; ``turn``,
a number that grows; ``resets``, a dict from row to seed and options; and ``actions`` [B, C, ...],
for the rows with an open episode that are not reset. ``ended``: rows whose episode is over for the
rollout rank. The answer is a dict too: ``host`` and ``turn``, ``batch``, ``played``
bool [B, C], the actions that were played, and ``failures``, a dict from row to reason and message.
A repeated command gets the same answer again and is not played again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rollout.environments.acting import ActingEnvironment
from rollout_workers.multistep.environment import FLAGS, observations_of
from rollout_workers.multistep.errors import BatchInvalid

FAILED, LOST, TIMEOUT = "ENVIRONMENT_FAILED", "ENVIRONMENT_LOST", "ENVIRONMENT_TIMEOUT"


class EpisodeRank:
    """Plays the chunks of one rollout rank. Environments are made when they are first needed.

    rows: of the rollout rank. chunk: actions of a chunk. most_steps: an episode that is longer is
    truncated.
    """

    def __init__(self, make: Callable[[], ActingEnvironment], *, rows: int, chunk: int, most_steps: int) -> None:
        """Make one environment, whose first observation stands for rows without an episode.
        Raises the errors of ``make``."""
        self.host = secrets.token_hex(8)
        self._make, self._rows, self._chunk, self._most_steps = make, rows, chunk, most_steps
        self._environments: list[ActingEnvironment | None] = [make(), *[None] * (rows - 1)]
        first = self._environments[0]
        assert first is not None
        self._current: list[Any] = [first.reset(seed=0)[0]] * rows
        self._steps: list[int | None] = [None] * rows  # of the open episode, if there is one
        self._sender, self._turn = "", -1
        self._answer: dict[str, Any] = {}
        self.steps = 0
        """Steps that were played."""
        self.playing: int | None = None
        """The row whose environment computes. Any thread may read it."""

    def answer(self, command: Mapping[str, Any]) -> dict[str, Any] | None:
        """Play a command; blocks. None for one that is older than the last. Raises
        :class:`BatchInvalid`."""
        if command["sender"] == self._sender and command["turn"] <= self._turn:
            return self._answer if command["turn"] == self._turn else None
        if command["sender"] != self._sender:
            self._steps = [None] * self._rows
        self._sender, self._turn = command["sender"], command["turn"]
        self._answer = self._play(command["resets"], command["actions"], command["ended"])
        return self._answer

    def fresh(self) -> EpisodeRank:
        """Another rank with environments of its own, in which no episode is open. Raises the errors
        of ``make``."""
        return EpisodeRank(self._make, rows=self._rows, chunk=self._chunk, most_steps=self._most_steps)

    def close(self) -> None:
        """Close the environments that can be closed."""
        for environment in self._environments:
            close = getattr(environment, "close", None)
            if callable(close):
                close()

    def _play(self, resets: Mapping[int, Mapping[str, Any]], actions: Any, ended: Sequence[int]) -> dict[str, Any]:
        rows, chunk = self._rows, self._chunk
        chosen = None if actions is None else np.asarray(actions)
        if chosen is not None and chosen.shape[:2] != (rows, chunk):
            raise BatchInvalid(f"actions have the shape {list(chosen.shape)}, not [{rows}, {chunk}, ...]")
        rewards, played = np.zeros((rows, chunk), np.float32), np.zeros((rows, chunk), np.bool_)
        flags = {name: np.zeros((rows, chunk), np.bool_) for name in FLAGS}
        failures: dict[int, tuple[str, str]] = {}
        final = list(self._current)
        for row in ended:
            self._steps[row] = None
        for row in range(rows):
            self.playing = row
            try:
                if row in resets:
                    self._reset(row, resets[row])
                    final[row] = self._current[row]
                elif chosen is not None and self._steps[row] is not None:
                    over = self._chunk_of(row, chosen[row], rewards, played)
                    final[row] = self._current[row]
                    for name, value in zip(FLAGS, (any(over), *over), strict=True):
                        flags[name][row, -1] = value
            except (Exception, SystemExit) as error:
                exits = isinstance(error, SystemExit)
                failures[row] = FAILED, "the environment called sys.exit" if exits else f"{type(error).__name__}: {error}"
                self._steps[row] = None
        self.playing = None
        batch = {
            "obs": observations_of(self._current),
            "final_obs": observations_of(final) if bool(flags["dones"].any()) else None,
            **{name: torch.from_numpy(flag) for name, flag in flags.items()},
            "rewards": torch.from_numpy(rewards),
        }
        return {"host": self.host, "turn": self._turn, "batch": batch, "played": torch.from_numpy(played), "failures": failures}

    def _reset(self, row: int, how: Mapping[str, Any]) -> None:
        environment = self._environments[row]
        if environment is None:
            environment = self._environments[row] = self._make()
        options = how.get("options")
        self._current[row] = environment.reset(seed=how["seed"], **({} if options is None else {"options": options}))[0]
        self._steps[row] = 0

    def _chunk_of(self, row: int, actions: Any, rewards: np.ndarray[Any, Any], played: np.ndarray[Any, Any]) -> tuple[bool, bool]:
        """Play a chunk in a row. Returns whether its episode terminated, and whether it was
        truncated."""
        environment, steps = self._environments[row], self._steps[row]
        assert environment is not None and steps is not None
        terminated = truncated = False
        for place, action in enumerate(actions):
            self._current[row], reward, terminated, truncated, _ = environment.step(action)
            rewards[row, place], played[row, place] = float(reward), True
            steps += 1
            self.steps += 1
            truncated = bool(truncated) or (steps >= self._most_steps and not terminated)
            if terminated or truncated:
                break
        self._steps[row] = None if terminated or truncated else steps
        return bool(terminated), bool(truncated)
