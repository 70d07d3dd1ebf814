"""The environment of a class in child processes: the user's,
``environment.path = "file.py:Class"``, or one of ``rollout.environments``. A manifest,
``environment.path = "plugin.toml:NAME"``, is that of a sidecar."""

from __future__ import annotations

import os
import sys

from rollout.environments import source
from rollout.hosting.manifest import is_manifest, read_manifest
from rollout.hosting.supervised import SupervisedSidecar
from rollout_workers.environments.hosted import Hosted
from rollout_workers.environments.registry import Context


def build(context: Context) -> Hosted:
    """Build the environment for the registry."""
    environment = context.config.environment
    if is_manifest(environment.path):
        return _sidecar(context)
    python = os.path.join(context.base_dir, environment.python) if environment.python else sys.executable
    return Hosted(
        source(environment.kind, environment.path, os.path.abspath(context.base_dir), environment.args),
        command=(python,),
        verify=context.verify,
    )


def _sidecar(context: Context) -> Hosted:
    environment = context.config.environment
    manifest = read_manifest(environment.path, context.base_dir, kind="environment")
    sidecar = SupervisedSidecar(manifest, args=environment.args or "{}", verify=context.verify)
    context.calls.supervise(environment.path, lambda: sidecar.condition)
    return Hosted({"kind": "environment", "plugin": environment.path}, verify=context.verify, sidecar=sidecar)
