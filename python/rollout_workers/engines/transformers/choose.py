"""The choice of tokens by compiled code (``choose.c``), called through ctypes.

``scripts/kernel`` makes it when the environment is installed. The library is named for the content of its source, so one that was
made of other code is not loaded. Where there is none, torch (``sampler.py``) and numpy (``philox.py``) do the work.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout_workers.compiled import library

log = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("choose.c")
_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64


class Chooser:
    """The loops of a library. Shapes are the caller's to check."""

    def __init__(self, library: Path) -> None:
        """Raises ``OSError`` for what can't be loaded."""
        loaded = ctypes.CDLL(str(library))
        self._choose, self._uniforms = loaded.rollout_choose, loaded.rollout_uniforms
        self._choose.argtypes, self._choose.restype = [_POINTER, *[_NUMBER] * 2, *[_POINTER] * 6, ctypes.c_int], None
        self._uniforms.argtypes, self._uniforms.restype = [*[_POINTER] * 2, *[_NUMBER] * 2, _POINTER], None

    def choose(
        self, logits: Tensor, uniform: Tensor, temperature: Tensor | None, greedy: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens int64[B], logprobs and raw logprobs f32[B].

        logits f32[B, V], uniform f64[B], temperature f32[B, 1] and greedy bool[B] as in ``Controls``: contiguous, on the CPU.
        """
        rows, width = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64)
        logprobs, raw = torch.empty(rows), torch.empty(rows)
        given = [None if t is None else t.data_ptr() for t in (uniform, temperature, greedy, tokens, logprobs, raw)]
        self._choose(logits.data_ptr(), rows, width, *given, torch.get_num_threads())
        return tokens, logprobs, raw

    def uniforms(self, seeds: NDArray[np.uint64], start: NDArray[np.int64], count: int) -> NDArray[np.float64]:
        """What ``philox.uniforms`` answers, bit for bit."""
        out = np.empty((len(seeds), count))
        seeds, start = np.ascontiguousarray(seeds), np.ascontiguousarray(start)
        self._uniforms(seeds.ctypes.data, start.ctypes.data, len(seeds), count, out.ctypes.data)
        return out


@functools.cache
def compiled() -> Chooser | None:
    """The library of the source as it is; None where it is not there."""
    try:
        return Chooser(library(SOURCE))
    except OSError as error:
        log.warning("tokens are chosen by torch, which takes longer: %s. Fix: scripts/kernel, which needs a C compiler", error)
        return None
