"""Environments in which a policy acts for many steps (``[multistep]``)."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from rollout.environments import ArgumentInvalid
from rollout.errors import RolloutError
from rollout.hosting.episodes import load_class
from rollout.plugin.place import one_line

_FILE = re.compile(r"[^:]+\.py:[A-Za-z_][A-Za-z0-9_]*")


class GymnasiumMissing(RolloutError):
    """The interpreter of the workers lacks gymnasium."""

    reason: ClassVar[str] = "PACKAGE_MISSING"


class ActingEnvironment(Protocol):
    """An environment with gymnasium's interface. Observations are arrays of numbers, or dicts of
    arrays."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode. Returns the observation, and what is not used here."""
        ...

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Returns observation, reward, whether the episode terminated, whether it was truncated,
        and what is not used here."""
        ...


def is_file(environment: str) -> bool:
    """Whether ``multistep.environment`` names a class in a file, not an id of gymnasium."""
    return _FILE.fullmatch(environment) is not None


def maker(environment: str, base_dir: str, args: str) -> Callable[[], ActingEnvironment]:
    """A function that makes one environment. environment: an id of gymnasium, or ``file.py:Class``
    relative to ``base_dir``. args: a JSON object, or "". Raises ``EnvironmentImport``,
    :class:`GymnasiumMissing`; the function raises ``EnvironmentImport``, :class:`ArgumentInvalid`."""
    given: dict[str, Any] = json.loads(args or "{}")
    if is_file(environment):
        return load_class(environment, base_dir, given, methods=("reset", "step"), table="multistep").make
    try:
        gymnasium: Any = importlib.import_module("gymnasium")
    except ImportError as error:
        raise GymnasiumMissing(
            f"`multistep.environment = {environment!r}` is no `file.py:Class`, and gymnasium can't be imported: {error}",
            fix="install gymnasium in the environment of the workers: pip install gymnasium",
        ) from error

    def make() -> ActingEnvironment:
        try:
            return gymnasium.make(environment, **given)
        except Exception as error:
            raise ArgumentInvalid(
                f"gymnasium can't make {environment!r}: {one_line(error)}",
                fix="correct `environment` or `args` in [multistep]",
            ) from error

    return make
