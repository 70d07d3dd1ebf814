"""Lets a part of a worker hang once, for tests of the watchdog."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER_VARIABLE = "ROLLOUT_SIM_HANG"
"""A folder. A part hangs if there is a file with its name in it."""


def hangs(part: str) -> bool:
    """Whether ``part`` must hang now. Removes its file, so that one process hangs."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return False
    try:
        Path(folder, part).unlink()
    except FileNotFoundError:
        return False
    return True
