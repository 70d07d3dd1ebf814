"""The environment of a class in child processes: the user's,
``environment.path = "file.py:Class"``, or one of ``rollout.environments``."""

from __future__ import annotations

import os
import sys

from rollout.environments import source
from rollout_workers.environments.hosted import Hosted
from rollout_workers.environments.registry import Context


def build(context: Context) -> Hosted:
    """Build the environment for the registry."""
    environment = context.config.environment
    python = os.path.join(context.base_dir, environment.python) if environment.python else sys.executable
    return Hosted(
        source(environment.kind, environment.path, os.path.abspath(context.base_dir), environment.args),
        command=(python,),
        verify=context.verify,
    )
