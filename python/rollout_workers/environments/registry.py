"""The environments by their names in ``environment.kind``. Imports neither torch nor an
environment.

To add one, write a constructor ``build(context: Context) -> Environment``, add a row to
``ENVIRONMENTS`` and its name to ``EnvironmentConfig.kind`` in ``run_config.proto``, and run
``rollout_testing.envtest`` on it. If it scores its episodes itself, so that the config has no
``[reward]``, add its name to ``rewarding`` there, too. One with processes or connections has
``start`` and ``shutdown`` (``rollout.environment.ManagedEnvironment``). ``hosted.Hosted`` runs a
class in child processes, also with another interpreter. An environment of a package is a class in
``rollout.environments``, a row in its table, a lock (``scripts/lock``), and a row here with
``python:build``.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from rollout.config.v1.run_config_pb2 import RunConfig
from rollout.environment import Environment, ManagedEnvironment
from rollout.hosting.supervised import Verify, unpinned
from rollout.plan.v1.plan_pb2 import Tool
from rollout_workers.data.prompts import PromptReader, Text
from rollout_workers.rewards.rewards import Scorer
from rollout_workers.worker.calls import Calls


@dataclass(frozen=True, slots=True)
class Context:
    """The parts from which an environment is built. rewards: None if the plan has no reward. text:
    the tokenizer. base_dir: folder of the config's relative paths. verify: raises if a source file
    of the environment differs from the plan; call it before the file is loaded. tools: of the plan;
    None without a plan. changed: ends the worker with this message, because the environment differs
    from the plan. calls: where open calls of tools are recorded."""

    config: RunConfig
    prompts: PromptReader
    rewards: Scorer | None
    text: Text
    base_dir: str = "."
    verify: Verify = unpinned
    tools: Sequence[Tool] | None = None
    changed: Callable[[str], None] = lambda message: None
    calls: Calls = field(default_factory=Calls)

    @property
    def args(self) -> dict[str, Any]:
        """``[environment.args]``."""
        return json.loads(self.config.environment.args or "{}")


Constructor = Callable[[Context], Environment]

ENVIRONMENTS: dict[str, str] = {
    "single_turn": "rollout_workers.environments.single_turn:build",
    "external": "rollout_workers.environments.external:build",
    "python": "rollout_workers.environments.python:build",
    "tools": "rollout_workers.environments.tools:build",
    "mcp": "rollout_workers.environments.mcp:build",
    "gymnasium": "rollout_workers.environments.python:build",
    "reasoning_gym": "rollout_workers.environments.python:build",
    "verifiers": "rollout_workers.environments.python:build",
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


@asynccontextmanager
async def opened(context: Context) -> AsyncGenerator[Environment]:
    """The environment that the config names, started, and stopped on exit. Raises
    :class:`UnknownEnvironment`, ``RolloutError``."""
    environment = build(context)
    if not isinstance(environment, ManagedEnvironment):
        yield environment
        return
    try:
        await environment.start()
        yield environment
    finally:
        await environment.shutdown()
