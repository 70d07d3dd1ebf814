"""Configs and policies that the tests of the multi-step worker share."""

from __future__ import annotations

from typing import Any

import torch

from rollout_workers.multistep.actor_critic import ActorCritic, ActorCriticConfig


def config(**changes: Any) -> dict[str, Any]:
    """A valid config; ``changes`` are dotted keys with ``__`` for the dot, and ``None`` removes."""
    cfg: dict[str, Any] = {
        "rollout": {"rank": 0, "world_size": 1},
        "env": {
            "world_size": 2,
            "train": {"total_num_envs": 4, "auto_reset": True, "max_steps_per_rollout_epoch": 8},
            "eval": {"total_num_envs": 2},
        },
        "actor": {"model": {"num_action_chunks": 2}},
        "algorithm": {"gamma": 0.5},
    }
    for key, value in changes.items():
        *path, last = key.split("__")
        node = cfg
        for part in path:
            node = node.setdefault(part, {})
        if value is None:
            node.pop(last, None)
        else:
            node[last] = value
    return cfg


def actor_critic(seed: int = 0, **settings: Any) -> ActorCritic:
    torch.manual_seed(seed)
    return ActorCritic(ActorCriticConfig(hidden_size=8, layers=1, **{"chunk": 2, "value_columns": 2, **settings})).eval()
