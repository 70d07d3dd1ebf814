"""Environments of known packages, by their names in ``environment.kind``.

Their packages exclude each other's versions and the learner's, so each has an interpreter of its
own: ``rollout plugin install NAME`` makes it from a hashed lock, and ``environment.python`` names
it. The files here import their package when the environment is constructed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

from rollout.errors import RolloutError

FOLDER = str(Path(__file__).parent)
PLUGINS = {
    "gymnasium": "vector.py:Gymnasium",
    "mcp": "mcp_tools.py:McpTools",
    "reasoning_gym": "procedural.py:ReasoningGym",
    "verifiers": "dialogs.py:Verifiers",
}
"""Kind -> ``file.py:Class`` in this folder. ``locks/KIND.lock`` has the versions of its
packages."""


def source(kind: str, path: str, base_dir: str, args: str) -> dict[str, str]:
    """The class of an environment that runs in child processes (``rollout.hosting.host.Source``).

    path: ``environment.path``, the class itself, or an argument of the class for ``kind``.
    base_dir: where it starts. args: ``[environment.args]`` as JSON.
    """
    ours = PLUGINS.get(kind, "")
    if ours and path:
        args = json.dumps(json.loads(args or "{}") | {"path": path, "base_dir": base_dir})
    return {"kind": "environment", "plugin": ours or path, "base_dir": FOLDER if ours else base_dir, "args": args}


class PackageMissing(RolloutError):
    """The interpreter of an environment lacks its package."""

    reason: ClassVar[str] = "PACKAGE_MISSING"

    def __init__(self, kind: str, error: ImportError) -> None:
        """kind: of the environment. error: of the import."""
        super().__init__(
            f'`environment.kind = "{kind}"`: {error}',
            fix=f"run `rollout plugin install {kind}`, and set `environment.python` to the interpreter that it prints",
        )


class ArgumentInvalid(RolloutError):
    """A value of ``[environment.args]`` does not fit."""

    reason: ClassVar[str] = "ENVIRONMENT_ARGUMENT"
