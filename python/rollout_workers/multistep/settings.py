"""The settings of a multi-step rollout worker, read from RLinf's config keys."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rollout_workers.multistep.errors import SettingsInvalid
from rollout_workers.multistep.ranks import Peer, mapped_ranks

MODES = ("train", "eval")
_REQUIRED = object()


@dataclass(frozen=True, slots=True)
class Settings:
    """What the worker uses of its config.

    peers: by mode, the environment ranks in the order in which batches are received and sent. A
    mode without ``total_num_envs`` is not there.
    """

    rank: int
    world_size: int
    peers: Mapping[str, tuple[Peer, ...]]
    chunk: int
    """Actions of a row in one batch: ``actor.model.num_action_chunks``."""
    auto_reset: bool
    gamma: float
    bootstrap_type: str
    """``standard``: truncated rows are bootstrapped. Anything else: all rows that are done."""
    model_path: str
    device: str
    trust_remote_code: bool
    receive_timeout_seconds: float


def read_settings(cfg: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Settings:
    """Read nested mappings, such as a ``dict`` or a ``DictConfig``. Keys that the worker does not
    use are ignored. Raises :class:`SettingsInvalid` with every problem."""
    if not isinstance(cfg, Mapping):
        raise SettingsInvalid(f"cfg is a {type(cfg).__name__}, not a mapping", fix="pass a dict or a DictConfig")
    read = _Reader(cfg)
    rank, world_size = _ranks(read, environ)
    env_ranks = read("env.world_size", _positive, 1)
    stages = read("rollout.pipeline_stage_num", _positive, 1)
    chunk = read("actor.model.num_action_chunks", _positive)
    modes: dict[str, tuple[int, int]] = {}
    for mode in MODES:
        if mode == "train" or read.has(f"env.{mode}.total_num_envs"):
            total = read(f"env.{mode}.total_num_envs", _positive)
            modes[mode] = total, read(f"env.{mode}.max_steps_per_rollout_epoch", _positive, 0)
    auto_reset = read("env.train.auto_reset", _boolean)
    gamma = read("algorithm.gamma", _fraction)
    bootstrap_type = read("algorithm.bootstrap_type", _text, "standard")
    path = read("rollout.model.model_path", _text, "")
    device = read("rollout.device", _text, "cpu")
    trusted = read("rollout.model.trust_remote_code", _boolean, False)
    timeout = read("rollout.receive_timeout_seconds", _seconds, 600.0)
    peers: dict[str, tuple[Peer, ...]] = {}
    if not read.problems:
        for mode, (total, steps) in modes.items():
            wrong = len(read.problems)
            for name, size in (("WORLD_SIZE", world_size), ("env.world_size", env_ranks)):
                if total % (size * stages):
                    read.wrong(
                        f"env.{mode}.total_num_envs", total, f"a multiple of {size * stages} ({name} times pipeline stages)"
                    )
            if steps % chunk:
                read.wrong(
                    f"env.{mode}.max_steps_per_rollout_epoch", steps, f"a multiple of {chunk} (actor.model.num_action_chunks)"
                )
            if len(read.problems) == wrong:
                peers[mode] = mapped_ranks(total // stages, world_size=world_size, peers=env_ranks, rank=rank)
    if read.problems:
        raise SettingsInvalid("; ".join(read.problems), fix="docs/multistep.md lists the keys")
    return Settings(
        rank=rank,
        world_size=world_size,
        peers=MappingProxyType(peers),
        chunk=chunk,
        auto_reset=auto_reset,
        gamma=gamma,
        bootstrap_type=bootstrap_type,
        model_path=path,
        device=device,
        trust_remote_code=trusted,
        receive_timeout_seconds=timeout,
    )


def _ranks(read: _Reader, environ: Mapping[str, str]) -> tuple[int, int]:
    found: list[int] = []
    for name, key, least, default in (("RANK", "rollout.rank", 0, 0), ("WORLD_SIZE", "rollout.world_size", 1, 1)):
        if read.has(key):
            found.append(read(key, _positive if least else _natural))
            continue
        value = environ.get(name, str(default))
        if not value.isdecimal() or int(value) < least:
            read.problems.append(f"{name}={value} is not an integer of at least {least}")
            value = str(default)
        found.append(int(value))
    rank, world_size = found
    if not read.problems and rank >= world_size:
        read.problems.append(f"rank {rank} is not below the world size {world_size}")
    return rank, world_size


class _Reader:
    """Reads dotted keys of nested mappings, and collects what is wrong with them."""

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        self.problems: list[str] = []
        self._cfg = cfg

    def has(self, key: str) -> bool:
        return self._find(key) is not None

    def __call__(self, key: str, check: Callable[[Any], tuple[Any, str]], default: Any = _REQUIRED) -> Any:
        value = self._find(key)
        if value is None:
            if default is _REQUIRED:
                self.problems.append(f"{key} is missing")
                return check(None)[0]
            return default
        found, wanted = check(value)
        if wanted:
            self.wrong(key, value, wanted)
        return found

    def wrong(self, key: str, value: Any, wanted: str) -> None:
        self.problems.append(f"{key}: {value!r} is not {wanted}")

    def _find(self, key: str) -> Any:
        node: Any = self._cfg
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        return node


# Each returns the value, or one that can be computed with, and what the value is not.


def _positive(value: Any) -> tuple[int, str]:
    right = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return (value, "") if right else (1, "a positive integer")


def _natural(value: Any) -> tuple[int, str]:
    right = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return (value, "") if right else (0, "an integer of at least 0")


def _boolean(value: Any) -> tuple[bool, str]:
    return (value, "") if isinstance(value, bool) else (False, "true or false")


def _text(value: Any) -> tuple[str, str]:
    return (value, "") if isinstance(value, str) else ("", "a text")


def _fraction(value: Any) -> tuple[float, str]:
    right = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1
    return (float(value), "") if right else (0.0, "a number from 0 to 1")


def _seconds(value: Any) -> tuple[float, str]:
    right = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
    return (float(value), "") if right else (1.0, "a positive number of seconds")
