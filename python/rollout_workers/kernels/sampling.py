"""Token sampling and random numbers in ``sampling.c``. torch (``sampler.py``) and numpy
(``philox.py``) are the fallbacks."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout_workers.kernels.loading import loaded

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64


class SamplingKernels:
    """The functions of the library. They do not check shapes."""

    def __init__(self, library: Path) -> None:
        """Load ``library``. Raises ``OSError`` if it cannot be loaded."""
        functions = ctypes.CDLL(str(library))
        self._sample, self._uniforms = functions.rollout_sample, functions.rollout_uniforms
        self._sample.argtypes, self._sample.restype = [_POINTER, *[_NUMBER] * 2, *[_POINTER] * 6, ctypes.c_int], None
        self._uniforms.argtypes, self._uniforms.restype = [*[_POINTER] * 2, *[_NUMBER] * 2, _POINTER], None

    def sample(
        self, logits: Tensor, uniform: Tensor, temperature: Tensor | None, greedy: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens int64[B], logprobs f32[B], and logprobs at temperature 1 f32[B].

        logits f32[B, V], uniform f64[B] in [0, 1), temperature f32[B, 1] above 0 (None: 1), greedy
        bool[B] (None: no row). All are contiguous and on the CPU.
        """
        rows, width = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64)
        logprobs, raw = torch.empty(rows), torch.empty(rows)
        given = [None if t is None else t.data_ptr() for t in (uniform, temperature, greedy, tokens, logprobs, raw)]
        self._sample(logits.data_ptr(), rows, width, *given, torch.get_num_threads())
        return tokens, logprobs, raw

    def uniforms(self, seeds: NDArray[np.uint64], start: NDArray[np.int64], count: int) -> NDArray[np.float64]:
        """The same bits as ``philox.uniforms``: f64[n, count]. seeds, start: [n]. start, count:
        even."""
        out = np.empty((len(seeds), count))
        seeds, start = np.ascontiguousarray(seeds), np.ascontiguousarray(start)
        self._uniforms(seeds.ctypes.data, start.ctypes.data, len(seeds), count, out.ctypes.data)
        return out


@functools.cache
def sampling_kernels() -> SamplingKernels | None:
    """The compiled kernels; None if there are none."""
    return loaded(SamplingKernels, "sampling")
