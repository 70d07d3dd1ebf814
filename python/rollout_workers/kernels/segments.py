"""The segments of a weights patch in ``segments.c``: one pass over memory, without the
interpreter's lock."""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollout_workers.kernels.loading import loaded
from rollout_workers.kernels.segments_numpy import HEAD, SEGMENT, Bytes, NumpySegments, Span, padded


class SegmentCodec(Protocol):
    """Encodes and applies segments. Buffers are arrays of bytes: whole files, and the bodies of
    patches."""

    def encode(self, old: Bytes, new: Bytes, piece: Span) -> tuple[bytes, int]:
        """Encode the segments that turn a piece of ``old`` into the same piece of ``new``. Returns
        them with the number of their values."""
        ...

    def check(self, body: Bytes, at: int, span: Span) -> tuple[NDArray[np.uint64], int]:
        """Validate the segments of a span. The first one starts at byte ``at`` of ``body``.

        Returns the start of each segment and the end of the last one. A negative end -1 - n means
        that segment n is truncated, malformed, or writes outside of its elements.
        """
        ...

    def write(self, target: Bytes, body: Bytes, places: NDArray[np.uint64], piece: Span) -> None:
        """Write the values of segments into a piece of ``target``. ``places``: the starts of the
        segments from ``check``."""
        ...


class CompiledSegments:
    """The :class:`SegmentCodec` in C. Do not change a body between ``check`` and ``write``:
    ``write`` validates nothing."""

    def __init__(self, library: Path) -> None:
        """Load ``library``. Raises ``OSError`` if it cannot be loaded."""
        functions = ctypes.CDLL(str(library))
        pointer, number = ctypes.c_void_p, ctypes.c_uint64
        self._encode, self._check, self._write = functions.rollout_encode, functions.rollout_check, functions.rollout_write
        self._encode.argtypes = [pointer, pointer, number, number, pointer, pointer, ctypes.POINTER(number)]
        self._encode.restype = number
        self._check.argtypes = [pointer, number, number, number, number, pointer]
        self._check.restype = ctypes.c_int64
        self._write.argtypes = [pointer, pointer, number, number, pointer]
        self._write.restype = None

    def encode(self, old: Bytes, new: Bytes, piece: Span) -> tuple[bytes, int]:
        scratch = np.empty(SEGMENT * (4 + piece.width), np.uint8)  # the marks and the values of one segment
        # An upper bound: one byte per mark and element. Marks of two bytes are used only if few
        # values changed.
        room = (HEAD.size + 16) * _segments(piece) + padded(piece.count) + padded(piece.count * piece.width)
        out = np.empty(room, np.uint8)
        changed = ctypes.c_uint64()
        size = self._encode(
            _address(old, piece), _address(new, piece), piece.width, piece.count, scratch.ctypes.data, out.ctypes.data, changed
        )
        return out[:size].tobytes(), changed.value

    def check(self, body: Bytes, at: int, span: Span) -> tuple[NDArray[np.uint64], int]:
        places = np.empty(_segments(span), np.uint64)
        return places, self._check(body.ctypes.data, len(body), at, span.width, span.count, places.ctypes.data)

    def write(self, target: Bytes, body: Bytes, places: NDArray[np.uint64], piece: Span) -> None:
        if len(places) != _segments(piece) or not target.flags.writeable:
            raise ValueError(f"{len(places)} places for {_segments(piece)} segments, or a read-only target")
        self._write(body.ctypes.data, places.ctypes.data, len(places), piece.width, _address(target, piece))


@functools.cache
def segment_codec() -> SegmentCodec:
    """The compiled codec if it is available, else the one in numpy. Both produce the same bytes."""
    compiled = loaded(CompiledSegments, "segments") if sys.byteorder == "little" else None
    return compiled or NumpySegments()


def _segments(piece: Span) -> int:
    return -(-piece.count // SEGMENT)


def _address(data: Bytes, piece: Span) -> int:
    """The address of a piece of a buffer. Raises ``ValueError`` if the piece is not inside of the
    buffer."""
    if piece.start + piece.count * piece.width > len(data):
        raise ValueError(f"{piece} in {len(data)} bytes")
    return data.ctypes.data + piece.start
