"""A clone of this checkout, for tests that need a clean one."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_AUTHOR = ("-c", "user.name=check", "-c", "user.email=check@example.com")


def git(*arguments: str | Path, folder: Path = ROOT) -> str:
    command = ["git", *_AUTHOR, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def clone(target: Path) -> Path:
    """Clone this checkout, with changes of tracked files that are not committed yet."""
    commit = git("stash", "create", "changes") or git("rev-parse", "HEAD")
    git("clone", "--quiet", "--shared", "--no-checkout", ROOT, target)
    git("checkout", "--quiet", "--detach", commit, folder=target)
    return target
