"""A clone of this checkout, for tests that need a clean one."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def git(*arguments: str | Path, folder: Path = ROOT) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def clone(target: Path) -> Path:
    """Clone this checkout, with changes of tracked files that are not committed yet."""
    author = ("-c", "user.name=check", "-c", "user.email=check@example.com")
    commit = git(*author, "stash", "create", "changes") or git("rev-parse", "HEAD")
    git("clone", "--quiet", "--shared", "--no-checkout", ROOT, target)
    git("checkout", "--quiet", "--detach", commit, folder=target)
    git("config", "user.name", "check", folder=target)
    git("config", "user.email", "check@example.com", folder=target)
    return target
