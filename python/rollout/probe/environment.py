"""Installed packages and credentials of the probe's environment."""

from __future__ import annotations

import importlib.metadata
import netrc
import os
from urllib.parse import urlsplit


def versions(names: list[str]) -> dict[str, str | None]:
    """The installed version of each distribution; ``None`` if it is absent. Imports none of
    them."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def has_wandb_key() -> bool:
    """Whether W&B's library finds a key: in its environment variable, or in the netrc file of
    ``wandb login``."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
