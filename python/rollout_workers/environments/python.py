"""The environment of a user's class, ``environment.path = "file.py:Class"``."""

from __future__ import annotations

from rollout_workers.environments.hosted import Hosted
from rollout_workers.environments.registry import Context


def build(context: Context) -> Hosted:
    """Build the environment for the registry."""
    environment = context.config.environment
    source = {
        "kind": "environment",
        "plugin": environment.path,
        "base_dir": context.base_dir,
        "args": environment.args,
    }
    return Hosted(source, verify=context.verify)
