"""Serialised trajectories into columns by compiled code (``trajectories.c``), called through ctypes.

Protobuf makes an object of each message inside another, and of each array: 20 us for a trajectory of ten tokens, 5 ms for 256 of
them. ``scripts/kernel`` compiles the library when the environment is installed; it is named for the content of its source, so one
that was made of other code is not loaded.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollout_workers.compiled import library

log = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("trajectories.c")
_COLUMNS = 13
_TOKEN = 9  # bytes: a token's number, its logprob and its mask


@dataclass(frozen=True, slots=True)
class Columns:
    """What n trajectories hold."""

    rows: list[list[int]]
    """For each: tokens, tokens of the prompt, epoch, index, sample, part, oldest version, outcome, where in the payload prompt
    and completion begin and end (four numbers), and 1 where there is more to know: metrics, token rewards, a teacher's
    logprobs."""
    rewards: list[float]
    token_ids: NDArray[np.int32]
    """int32 [T], one trajectory behind the other, as are float32 ``logprobs`` and uint8 ``mask``."""
    logprobs: NDArray[np.float32]
    mask: NDArray[np.uint8]


class Reader:
    """The functions of a library."""

    def __init__(self, library: Path) -> None:
        """Raises ``OSError`` for what can't be loaded."""
        self._read = ctypes.CDLL(str(library)).rollout_trajectories
        pointer = ctypes.c_void_p
        self._read.argtypes = [pointer, pointer, ctypes.c_uint64, *(pointer,) * 5]
        self._read.restype = ctypes.c_uint64

    def read(self, payloads: Sequence[bytes]) -> Columns | None:
        """The columns of these payloads; None where one is not as the workers write it: protobuf can say more of it."""
        count, sizes = len(payloads), np.array([len(payload) for payload in payloads], np.uint64)
        places = (ctypes.c_char_p * count)(*payloads)
        rows, rewards = np.zeros((count, _COLUMNS), np.int64), np.zeros(count)
        room = int(sizes.sum()) // _TOKEN
        token_ids, logprobs, mask = np.empty(room, "<i4"), np.empty(room, "<f4"), np.empty(room, np.uint8)
        filled = [array.ctypes.data for array in (rows, rewards, token_ids, logprobs, mask)]
        if self._read(ctypes.addressof(places), sizes.ctypes.data, count, *filled) != count:
            return None
        return Columns(rows.tolist(), rewards.tolist(), token_ids, logprobs, mask)


@functools.cache
def compiled() -> Reader | None:
    """The library of the source as it is; None where it is not there, and then protobuf does the work."""
    if sys.byteorder != "little":
        return None
    try:
        return Reader(library(SOURCE))
    except OSError as error:
        log.warning(
            "payloads are read by protobuf, several times slower: %s. Fix: scripts/kernel, which needs a C compiler", error
        )
        return None
