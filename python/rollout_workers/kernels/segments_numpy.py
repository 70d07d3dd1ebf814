"""The segments of a weights patch in numpy: the reference for ``segments.c``, and its fallback."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SEGMENT = 1 << 18  # elements
HEAD = struct.Struct("<IIII")  # marks, values, bytes per mark, 0
_DENSE = 160  # elements per change up to which one-byte marks take less space than two-byte marks

Bytes = NDArray[np.uint8]
Marks = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True)
class Span:
    """Adjacent elements of equal width."""

    start: int
    """The first byte in the file."""
    width: int
    """Bytes per element: 1, 2, 4, or 8."""
    count: int
    """Elements."""


class NumpySegments:
    """The ``segments.SegmentCodec`` in numpy."""

    def encode(self, old: Bytes, new: Bytes, piece: Span) -> tuple[bytes, int]:
        parts = [_encode_segment(old, new, segment) for segment in segments(piece)]
        return b"".join(part for part, _ in parts), sum(values for _, values in parts)

    def check(self, body: Bytes, at: int, span: Span) -> tuple[NDArray[np.uint64], int]:
        places: list[int] = []
        for number, segment in enumerate(segments(span)):
            places.append(at)
            if len(body) - at < HEAD.size:
                return np.empty(0, np.uint64), -1 - number
            made, values, width, _ = HEAD.unpack(body[at : at + HEAD.size].tobytes())
            at += HEAD.size + padded(made * width) + padded(values * segment.width)
            if values > made or width not in (1, 2) or at > len(body):
                return np.empty(0, np.uint64), -1 - number
            marks, _ = _read(body, places[-1], segment.width)
            skips = int(np.count_nonzero(marks == np.iinfo(marks.dtype).max))
            if skips != made - values or (made and int(marks.sum(dtype=np.uint64)) >= segment.count):
                return np.empty(0, np.uint64), -1 - number
        return np.array(places, np.uint64), at

    def write(self, target: Bytes, body: Bytes, places: NDArray[np.uint64], piece: Span) -> None:
        for at, segment in zip(places.tolist(), segments(piece), strict=True):
            marks, values = _read(body, at, segment.width)
            elements = np.cumsum(marks, dtype=np.int64)
            if len(marks) != len(values):
                elements = elements[marks != np.iinfo(marks.dtype).max]
            _elements(target, segment)[elements] = values


def segments(span: Span) -> Iterator[Span]:
    """Divide a span into segments of at most ``SEGMENT`` elements."""
    for first in range(0, span.count, SEGMENT):
        yield Span(span.start + first * span.width, span.width, min(SEGMENT, span.count - first))


def padded(size: int) -> int:
    """The next multiple of 8."""
    return size + -size % 8


def _read(body: Bytes, at: int, width: int) -> tuple[Marks, NDArray[Any]]:
    """The marks and values of a segment."""
    marks, values, size, _ = HEAD.unpack(body[at : at + HEAD.size].tobytes())
    first = at + HEAD.size
    second = first + padded(marks * size)
    return np.frombuffer(body, f"<u{size}", marks, first), np.frombuffer(body, f"<u{width}", values, second)


def _elements(data: Bytes, piece: Span, width: int = 0) -> NDArray[Any]:
    """A segment as unsigned integers of its element width, or of ``width`` bytes."""
    return data[piece.start : piece.start + piece.count * piece.width].view(f"<u{width or piece.width}")


def _changed(old: Bytes, new: Bytes, piece: Span) -> NDArray[np.int64]:
    """The indices of the elements that differ. Compares 8 bytes at a time, then the elements of the
    words that differ."""
    lanes = 8 // piece.width
    whole = piece.count // lanes * lanes
    words = Span(piece.start, piece.width, whole)
    before, after = _elements(old, words, 8), _elements(new, words, 8)
    found = np.flatnonzero(before != after)
    if lanes > 1:
        differing = (before.take(found) ^ after.take(found)).view(f"<u{piece.width}")
        lane = np.flatnonzero(differing != 0)  # three times as fast as on the integers
        found = found.take(lane >> lanes.bit_length() - 1) * lanes + (lane & lanes - 1)
    if whole == piece.count:
        return found
    rest = Span(piece.start + whole * piece.width, piece.width, piece.count - whole)
    return np.concatenate((found, whole + np.flatnonzero(_elements(old, rest) != _elements(new, rest))))


def _encode_segment(old: Bytes, new: Bytes, piece: Span) -> tuple[bytes, int]:
    """The bytes of a segment, and the number of its values."""
    places = _changed(old, new, piece)
    values = _elements(new, piece).take(places)
    width = 1 if len(places) * _DENSE >= piece.count else 2
    marks = _marks(places, width)
    packed = marks.tobytes()
    data = values.tobytes()
    parts = HEAD.pack(len(marks), len(values), width, 0), packed, bytes(-len(packed) % 8), data, bytes(-len(data) % 8)
    return b"".join(parts), len(values)


def _marks(places: NDArray[np.int64], width: int) -> Marks:
    """The distances between changed elements as marks. A distance that does not fit is preceded by
    marks of the highest value."""
    highest = (1 << 8 * width) - 1
    distances = np.diff(places, prepend=0)
    # few elements; dividing every distance would take longer than everything else here
    long = np.flatnonzero(distances >= highest)
    if not len(long):
        return distances.astype(f"<u{width}")
    skips = distances.take(long) // highest
    distances[long] -= skips * highest
    ends = np.ones(len(places), np.int64)
    ends[long] += skips
    np.cumsum(ends, out=ends)
    marks = np.full(int(ends[-1]), highest, f"<u{width}")
    marks[ends - 1] = distances
    return marks
