"""Loads a compiled kernel, or reports that its fallback is used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rollout_workers.kernels.build import library

log = logging.getLogger(__name__)
K = TypeVar("K")


def loaded(kernels: Callable[[Path], K], name: str) -> K | None:
    """``kernels`` of the library that ``name``.c compiles to; None, after a warning, if it is
    missing or cannot be loaded."""
    try:
        return kernels(library(name))
    except OSError as error:
        log.warning(
            "kernels/%s.c is not compiled, so a slower fallback is used: %s. Fix: run scripts/kernel, which needs a C compiler",
            name,
            error,
        )
        return None
