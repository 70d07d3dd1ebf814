"""The environment of a class in child processes: the user's,
``environment.path = "file.py:Class"``, or one of ``rollout.environments``."""

from __future__ import annotations

import os
import sys

from rollout.environments import FOLDER, PLUGINS
from rollout_workers.environments.hosted import Hosted
from rollout_workers.environments.registry import Context


def build(context: Context) -> Hosted:
    """Build the environment for the registry."""
    environment = context.config.environment
    ours = PLUGINS.get(environment.kind, "")
    source = {
        "kind": "environment",
        "plugin": ours or environment.path,
        "base_dir": FOLDER if ours else context.base_dir,
        "args": environment.args,
    }
    python = os.path.join(context.base_dir, environment.python) if environment.python else sys.executable
    return Hosted(source, command=(python,), verify=context.verify)
