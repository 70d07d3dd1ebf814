"""An environment rank: hosts environments, and exchanges batches with rollout ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rollout_workers.multistep.channel import Channel
from rollout_workers.multistep.errors import BatchInvalid
from rollout_workers.multistep.ranks import Peer, channel_key


class Environment(Protocol):
    """An environment with gymnasium's interface. Observations are arrays of numbers."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode. Returns the observation, and what is not used here."""
        ...

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Returns observation, reward, whether the episode terminated, whether it was truncated,
        and what is not used here."""
        ...


class EnvironmentRank:
    """Plays chunks of actions in its environments, and resets those whose episode ended.

    An episode that ends within a chunk skips the chunk's other actions: their rewards are 0, and
    its flags are in the last column. peers: the mapped rollout ranks (:func:`mapped_ranks`), whose
    rows are those of the environments in order. seed: environment ``i`` is first reset with ``seed
    + i``. returns: the undiscounted returns of the episodes that ended, in order.
    """

    def __init__(
        self, environments: Sequence[Environment], peers: Sequence[Peer], *, rank: int = 0, seed: int = 0, mode: str = "train"
    ) -> None:
        if sum(peer.rows for peer in peers) != len(environments):
            raise ValueError(f"the mapped rollout ranks have {sum(peer.rows for peer in peers)} rows, not {len(environments)}")
        self.returns: list[float] = []
        self._environments, self._peers, self._rank, self._mode = environments, peers, rank, mode
        self._running = [0.0] * len(environments)
        self._current = [environment.reset(seed=seed + place)[0] for place, environment in enumerate(environments)]

    def first(self, chunk: int) -> dict[str, Any]:
        """The batch before any action, without rewards."""
        none = torch.zeros(len(self._environments), chunk, dtype=torch.bool)
        return {"obs": observations_of(self._current), "final_obs": None, **dict.fromkeys(FLAGS, none), "rewards": None}

    def step(self, actions: Tensor | np.ndarray[Any, Any]) -> dict[str, Any]:
        """Play a chunk, [B, C, ...]. Returns the batch, with ``final_obs`` if an episode ended."""
        chosen = np.asarray(actions)
        rows, chunk = len(self._environments), chosen.shape[1] if chosen.ndim > 1 else 0
        if chosen.shape[0] != rows or not chunk:
            raise BatchInvalid(f"actions of env rank {self._rank} have the shape {list(chosen.shape)}, not [{rows}, C, ...]")
        rewards = torch.zeros(rows, chunk)
        flags = {name: torch.zeros(rows, chunk, dtype=torch.bool) for name in FLAGS}
        final = list(self._current)
        for row, environment in enumerate(self._environments):
            terminated = truncated = False
            for place, action in enumerate(chosen[row]):
                final[row], reward, terminated, truncated, _ = environment.step(action)
                rewards[row, place] = float(reward)
                self._running[row] += float(reward)
                if terminated or truncated:
                    break
            self._current[row] = final[row]
            for name, value in zip(FLAGS, (terminated or truncated, terminated, truncated), strict=True):
                flags[name][row, -1] = bool(value)
            if terminated or truncated:
                self.returns.append(self._running[row])
                self._running[row] = 0.0
                self._current[row] = environment.reset()[0]
        ended = bool(flags["dones"].any())
        return {
            "obs": observations_of(self._current),
            "final_obs": observations_of(final) if ended else None,
            **flags,
            "rewards": rewards,
        }

    async def play(self, observations: Channel, actions: Channel, chunk: int) -> None:
        """Exchange batches until the task is cancelled."""
        batch = self.first(chunk)
        while True:
            first = 0
            for peer in self._peers:
                observations.put(_rows(batch, first, first + peer.rows), channel_key(self._rank, peer.rank, self._mode))
                first += peer.rows
            parts = [np.asarray(await actions.get(channel_key(peer.rank, self._rank, self._mode))) for peer in self._peers]
            batch = await asyncio.to_thread(self.step, np.concatenate(parts))


FLAGS = ("dones", "terminations", "truncations")


def observations_of(current: Sequence[Any]) -> dict[str, Tensor]:
    """The observations of rows as a batch: arrays as ``states``, in float32; dicts of arrays key by
    key, in their dtypes."""
    if isinstance(current[0], dict):
        return {key: torch.from_numpy(np.stack([np.asarray(item[key]) for item in current])) for key in current[0]}
    return {"states": torch.from_numpy(np.stack([np.asarray(item, dtype=np.float32) for item in current]))}


def _rows(batch: dict[str, Any], first: int, end: int) -> dict[str, Any]:
    return {
        key: _rows(value, first, end) if isinstance(value, dict) else value if value is None else value[first:end]
        for key, value in batch.items()
    }
