"""The environments by their names in ``environment.kind``. Imports neither torch nor an
environment.

To add one, write a constructor ``build(context: Context) -> Environment``, add a row to
``ENVIRONMENTS`` and its name to ``EnvironmentConfig.kind`` in ``run_config.proto``, and run
``rollout_testing.envtest`` on it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from rollout.config.v1.run_config_pb2 import RunConfig
from rollout.environment import Environment
from rollout_workers.data.prompts import PromptReader, Text
from rollout_workers.rewards.rewards import Scorer


@dataclass(frozen=True, slots=True)
class Context:
    """The parts from which an environment is built. rewards: None if the plan has no reward. text:
    the tokenizer."""

    config: RunConfig
    prompts: PromptReader
    rewards: Scorer | None
    text: Text


Constructor = Callable[[Context], Environment]

ENVIRONMENTS: dict[str, str] = {
    "single_turn": "rollout_workers.environments.single_turn:build",
    "external": "rollout_workers.environments.external:build",
}
"""Name -> ``module:function`` of the constructor. The module is imported when the environment is
built."""
DEFAULT = "single_turn"
EXTERNAL = "external"
"""The gateway gives the prompt groups to agents outside of the run; workers pull none."""


class UnknownEnvironment(ValueError):
    """``environment.kind`` names an environment that this worker does not have."""

    reason = "UNKNOWN_ENVIRONMENT"
    permanent = True


def build(context: Context) -> Environment:
    """The environment that the config names. Raises :class:`UnknownEnvironment`."""
    kind = context.config.environment.kind or DEFAULT
    if kind not in ENVIRONMENTS:
        names = ", ".join(ENVIRONMENTS)
        raise UnknownEnvironment(
            f"environment {kind!r} is unknown: set `environment.kind` to one of {names}, or update the workers"
        )
    module, _, function = ENVIRONMENTS[kind].partition(":")
    return cast(Constructor, getattr(importlib.import_module(module), function))(context)
