"""Which kind of plugin scores answers: a reward, or for a suite also an evaluation."""

from __future__ import annotations

import os

from rollout.hosting.manifest import is_manifest, read_manifest
from rollout.plugin.installed import has, is_installed


def kind_of(plugin: str, base_dir: str | os.PathLike[str] = ".", *, evaluates: bool) -> str:
    """``reward`` or ``evaluation``. A function of a file is a reward, which has the same arguments
    and results. evaluates: whether the plugin scores a suite; otherwise only a reward is right.
    Raises ``ManifestError``."""
    if not evaluates:
        return "reward"
    if is_manifest(plugin):
        return "evaluation" if read_manifest(plugin, base_dir).kind == "evaluation" else "reward"
    return "evaluation" if is_installed(plugin) and not has(plugin, "reward") and has(plugin, "evaluation") else "reward"
