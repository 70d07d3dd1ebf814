"""Algorithms by the name of their table in the run config."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from rollout_workers.algorithms.grpo import GrpoConfig, grpo
from rollout_workers.algorithms.sft import SftConfig, sft
from rollout_workers.algorithms.types import Algorithm

BUILDERS: dict[str, tuple[type[Any], Callable[[Any], Algorithm]]] = {
    "sft": (SftConfig, sft),
    "grpo": (GrpoConfig, grpo),
}


class UnknownAlgorithm(ValueError):
    """No algorithm has that name. The message lists those that exist."""

    reason = "UNKNOWN_ALGORITHM"


def build_algorithm(name: str, settings: Any = None) -> Algorithm:
    """The algorithm ``name`` with ``settings`` (its config dataclass; absent: the defaults).

    Raises ``UnknownAlgorithm``, or ``TypeError`` for the settings of another algorithm.
    """
    if name not in BUILDERS:
        close = get_close_matches(name, BUILDERS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise UnknownAlgorithm(f"no algorithm {name!r}{hint} There are: {', '.join(BUILDERS)}")
    config_type, build = BUILDERS[name]
    settings = config_type() if settings is None else settings
    if not isinstance(settings, config_type):
        raise TypeError(f"algorithm {name!r} takes {config_type.__name__}, not {type(settings).__name__}")
    return build(settings)
