"""Environments in which a policy acts for many steps (``[multistep]``)."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

from rollout.environments import ArgumentInvalid
from rollout.errors import Place, RolloutError
from rollout.hosting.episodes import EnvironmentImport
from rollout.plugin.loading import load_object, split_plugin
from rollout.plugin.place import last_frame, one_line
from rollout.plugin.score import RewardImportError

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
    relative to ``base_dir``. args: a JSON object, or "". Raises :class:`EnvironmentImport`,
    :class:`GymnasiumMissing`; the function raises :class:`EnvironmentImport`,
    :class:`ArgumentInvalid`."""
    given: dict[str, Any] = json.loads(args or "{}")
    if is_file(environment):
        return _of_file(environment, base_dir, given)
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


def _of_file(environment: str, base_dir: str, given: Mapping[str, Any]) -> Callable[[], ActingEnvironment]:
    file, name = split_plugin(environment)
    path = Path(os.path.abspath(os.path.join(base_dir, file)))
    try:
        made = load_object(environment, base_dir)
    except RewardImportError as error:
        message, fix = (
            error.message.replace("no function", "no class"),
            error.fix.replace(f"`def {name}(samples)`", f"`class {name}`"),
        )
        raise EnvironmentImport(message, fix=fix.replace("name a function", "name a class"), place=error.place) from error
    missing = [method for method in ("reset", "step") if not callable(getattr(made, method, None))]
    if missing:
        raise EnvironmentImport(
            f"`{name}` has no method `{missing[0]}`", fix="write `reset` and `step` as in gymnasium", place=Place(str(path))
        )
    try:
        inspect.signature(made).bind(**given)
    except TypeError as error:
        raise EnvironmentImport(
            f"`{name}` can't be constructed with `multistep.args`: {error}",
            fix=f"`multistep.args` must fit `{name}{inspect.signature(made)}`",
            place=Place(str(path)),
        ) from None

    def make() -> ActingEnvironment:
        try:
            return made(**given)
        except Exception as error:
            raise EnvironmentImport(
                f"`{name}()` raises {one_line(error)}", fix="correct the constructor", place=last_frame(error, path.parent)
            ) from error

    return make
