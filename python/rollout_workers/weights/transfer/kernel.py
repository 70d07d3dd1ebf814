"""Segments of a patch by compiled code (``segments.c``), called through ctypes: without the interpreter's lock, in one pass.

``scripts/kernel`` compiles it when the environment is installed. The library is named for the content of its source, so one that
was made of other code is not loaded.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollout_workers.compiled import library
from rollout_workers.weights.transfer.layout import Span
from rollout_workers.weights.transfer.plain import HEAD, SEGMENT, Bytes, Plain, padded

log = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("segments.c")


class Segments(Protocol):
    """What is done with the segments of neighbouring elements. Buffers are arrays of bytes, whole files and bodies of patches."""

    def encode(self, old: Bytes, new: Bytes, piece: Span) -> tuple[bytes, int]:
        """The segments of a piece of two files, one after the other, and how many values they have."""
        ...

    def check(self, body: Bytes, at: int, span: Span) -> tuple[NDArray[np.uint64], int]:
        """Where each segment of a span begins in ``body``, the first one at ``at``; and where the last one ends, or -1 - n where
        segment n is cut short, is none or leads out of its elements."""
        ...

    def write(self, target: Bytes, body: Bytes, places: NDArray[np.uint64], piece: Span) -> None:
        """Write the values of segments over those of a piece of ``target``. They begin at ``places``, which ``check`` said."""
        ...


class Kernel:
    """:class:`Segments` by compiled code. What ``check`` has looked at must not change before ``write`` is done with it."""

    def __init__(self, library: Path) -> None:
        """Raises ``OSError`` for what can't be loaded."""
        loaded = ctypes.CDLL(str(library))
        pointer, number = ctypes.c_void_p, ctypes.c_uint64
        self._encode, self._check, self._write = loaded.rollout_encode, loaded.rollout_check, loaded.rollout_write
        self._encode.argtypes = [pointer, pointer, number, number, pointer, pointer, ctypes.POINTER(number)]
        self._encode.restype = number
        self._check.argtypes = [pointer, number, number, number, number, pointer]
        self._check.restype = ctypes.c_int64
        self._write.argtypes = [pointer, pointer, number, number, pointer]
        self._write.restype = None

    def encode(self, old: Bytes, new: Bytes, piece: Span) -> tuple[bytes, int]:
        scratch = np.empty(SEGMENT * (4 + piece.width), np.uint8)  # the places and the values of a segment
        # At most a mark of one byte an element: marks of two bytes are used where there are few.
        room = (HEAD.size + 16) * _segments(piece) + padded(piece.count) + padded(piece.count * piece.width)
        out = np.empty(room, np.uint8)
        changed = ctypes.c_uint64()
        size = self._encode(
            _within(old, piece), _within(new, piece), piece.width, piece.count, scratch.ctypes.data, out.ctypes.data, changed
        )
        return out[:size].tobytes(), changed.value

    def check(self, body: Bytes, at: int, span: Span) -> tuple[NDArray[np.uint64], int]:
        places = np.empty(_segments(span), np.uint64)
        return places, self._check(body.ctypes.data, len(body), at, span.width, span.count, places.ctypes.data)

    def write(self, target: Bytes, body: Bytes, places: NDArray[np.uint64], piece: Span) -> None:
        if len(places) != _segments(piece) or not target.flags.writeable:
            raise ValueError(f"{len(places)} places for {_segments(piece)} segments, or a buffer that is not to be written to")
        self._write(body.ctypes.data, places.ctypes.data, len(places), piece.width, _within(target, piece))


@functools.cache
def fastest() -> Segments:
    """Compiled code where there is some, numpy where not; both make the same bytes."""
    if sys.byteorder == "little":
        try:
            return Kernel(library(SOURCE))
        except OSError as error:
            log.warning(
                "patches of weights are made in numpy, several times slower: %s. Fix: scripts/kernel, which needs a C compiler",
                error,
            )
    return Plain()


def _segments(piece: Span) -> int:
    return -(-piece.count // SEGMENT)


def _within(data: Bytes, piece: Span) -> int:
    """The address of a piece of a file. Raises ``ValueError`` where it leads out of it."""
    if piece.start + piece.count * piece.width > len(data):
        raise ValueError(f"{piece} in {len(data)} bytes")
    return data.ctypes.data + piece.start
