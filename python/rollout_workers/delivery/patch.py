"""Patches: the values of one version of the weights that differ from another's, with their places.

Between two steps few values of a model in bf16 change: one in a hundred is usual. A patch holds the distance from one changed
element to the next, and the new values; applying it writes them over the old ones. Format, little-endian:

    "RWPATCH1" | u32 length | header (JSON, padded to 8 bytes) | segment ... | u32 CRC-32C of all before
    segment = u32 marks | u32 values | u32 bytes a mark | u32 0 | mark ... | value ...     (marks and values padded to 8 bytes)

The header names both versions and digests, the bytes of the file, and the CRC-32C of what stands before the tensors: base and
result are safetensors files with the same names, types and shapes. A segment covers 2^18 elements of equal width, in the order of
the file. A mark is the distance to the next changed element (to the first one, from the segment's beginning); its highest value
means so many elements further and no value there. Elements are compared by their bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import crc32c
import numpy as np
from numpy.typing import NDArray

from rollout.errors import RolloutError
from rollout_workers.delivery.layout import Span, read_layout

MAGIC = b"RWPATCH1"
SEGMENT = 1 << 18
_HEAD = struct.Struct("<IIII")
_DENSE = 160  # elements from one change to the next, in the mean, up to which marks of a byte take less than those of two

Marks = NDArray[np.unsignedinteger[Any]]


class PatchCorrupt(RolloutError):
    """Bytes that are no whole patch, or one for another file."""

    reason: ClassVar[str] = "WEIGHTS_PATCH_CORRUPT"


@dataclass(frozen=True, slots=True)
class PatchHead:
    """What a patch says of itself. base_version, base_digest: what it is applied to; version, digest: what comes out.

    file_bytes: of either file. layout: CRC-32C of what stands before the tensors. changed: values in it.
    """

    base_version: int
    base_digest: str
    version: int
    digest: str
    file_bytes: int
    layout: int
    changed: int


@dataclass(frozen=True, slots=True)
class Ends:
    """The two versions of a patch and their weights digests."""

    base_version: int
    base_digest: str
    version: int
    digest: str


def encode(base: Any, wanted: Any, ends: Ends, *, most_bytes: int, threads: int = 1) -> bytes | None:
    """The patch that makes file ``wanted`` of file ``base`` (buffers); None where it takes more than ``most_bytes``, or where the
    two hold other tensors. Raises ``ValueError`` for what is no safetensors file."""
    head, spans = read_layout(base)
    other, _ = read_layout(wanted)
    if head != other:
        return None
    old, new = np.frombuffer(base, np.uint8), np.frombuffer(wanted, np.uint8)
    body: list[bytes] = []
    size = changed = 0
    with ThreadPoolExecutor(threads) as pool:
        for part, values in (pool.map if threads > 1 else map)(lambda piece: _encode_segment(old, new, piece), _segments(spans)):
            body.append(part)
            size += len(part)
            changed += values
            if size > most_bytes:
                pool.shutdown(cancel_futures=True)
                return None
    made = PatchHead(**asdict(ends), file_bytes=len(new), layout=crc32c.crc32c(head), changed=changed)
    text = json.dumps(asdict(made), separators=(",", ":")).encode()
    text += b" " * (-(len(MAGIC) + 4 + len(text)) % 8)
    whole = b"".join([MAGIC, struct.pack("<I", len(text)), text, *body])
    return whole + struct.pack("<I", crc32c.crc32c(whole))


def read_head(patch: Any) -> PatchHead:
    """What a patch says of itself, after a look at all its bytes. Raises :class:`PatchCorrupt`."""
    return _open(patch)[0]


def apply(patch: Any, file: Any, *, threads: int = 1) -> PatchHead:
    """Write a patch's values over those of ``file`` (a writable buffer that holds the base's bytes).

    The caller compares the weights digest of what came out. Raises :class:`PatchCorrupt` for bytes that are no whole patch, or a
    file of another layout, and has then written nothing.
    """
    head, body = _open(patch)
    try:
        before, spans = read_layout(file)
    except ValueError as error:
        raise PatchCorrupt(f"the patch is for another file: {error}") from error
    if len(memoryview(file)) != head.file_bytes or crc32c.crc32c(before) != head.layout:
        raise PatchCorrupt("the patch is for a file with other tensors")
    target = np.frombuffer(file, np.uint8)
    parts = list(_parts(body, spans))  # all of it is looked at before anything is written
    with ThreadPoolExecutor(threads) as pool:
        for _ in (pool.map if threads > 1 else map)(lambda part: _apply_segment(target, *part), parts):
            pass
    return head


def _segments(spans: Iterable[Span]) -> Iterator[Span]:
    for span in spans:
        for first in range(0, span.count, SEGMENT):
            yield Span(span.start + first * span.width, span.width, min(SEGMENT, span.count - first))


def _elements(data: NDArray[np.uint8], piece: Span, width: int = 0) -> NDArray[Any]:
    """A segment as unsigned integers, of its own width or of another."""
    return data[piece.start : piece.start + piece.count * piece.width].view(f"<u{width or piece.width}")


def _changed(old: NDArray[np.uint8], new: NDArray[np.uint8], piece: Span) -> NDArray[np.int64]:
    """Which elements of a segment differ. Eight bytes are compared at a time, and the few that differ looked at again."""
    lanes = 8 // piece.width
    whole = piece.count // lanes * lanes
    words = Span(piece.start, piece.width, whole)
    before, after = _elements(old, words, 8), _elements(new, words, 8)
    found = np.flatnonzero(before != after)
    if lanes > 1:
        differing = (before.take(found) ^ after.take(found)).view(f"<u{piece.width}")
        lane = np.flatnonzero(differing != 0)  # three times as fast as of the integers
        found = found.take(lane >> lanes.bit_length() - 1) * lanes + (lane & lanes - 1)
    if whole == piece.count:
        return found
    rest = Span(piece.start + whole * piece.width, piece.width, piece.count - whole)
    return np.concatenate((found, whole + np.flatnonzero(_elements(old, rest) != _elements(new, rest))))


def _encode_segment(old: NDArray[np.uint8], new: NDArray[np.uint8], piece: Span) -> tuple[bytes, int]:
    """A segment's bytes, and how many values it has."""
    places = _changed(old, new, piece)
    values = _elements(new, piece).take(places)
    width = 1 if len(places) * _DENSE >= piece.count else 2
    marks = _marks(places, width)
    packed = marks.tobytes()
    data = values.tobytes()
    parts = _HEAD.pack(len(marks), len(values), width, 0), packed, bytes(-len(packed) % 8), data, bytes(-len(data) % 8)
    return b"".join(parts), len(values)


def _marks(places: NDArray[np.int64], width: int) -> Marks:
    """Distances as marks; one that is too long for a mark is preceded by as many of the highest value as it takes."""
    highest = (1 << 8 * width) - 1
    distances = np.diff(places, prepend=0)
    long = np.flatnonzero(distances >= highest)  # few: to divide all takes longer than the rest
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


def _open(patch: Any) -> tuple[PatchHead, memoryview]:
    """The header, and the segments."""
    view = memoryview(patch).cast("B")
    least = len(MAGIC) + 4
    if len(view) < least + 4 or bytes(view[: len(MAGIC)]) != MAGIC:
        raise PatchCorrupt(f"{len(view)} bytes that don't begin as a patch does")
    (told,) = struct.unpack("<I", view[-4:])
    if crc32c.crc32c(view[:-4]) != told:
        raise PatchCorrupt("the patch has another checksum than it was written with: it was cut or changed on its way")
    (size,) = struct.unpack_from("<I", view, len(MAGIC))
    try:
        head = PatchHead(**json.loads(bytes(view[least : least + size])))
    except (ValueError, TypeError) as error:
        raise PatchCorrupt(f"the patch's header can't be read: {error!r}") from error
    return head, view[least + size : -4]


def _parts(body: memoryview, spans: list[Span]) -> Iterator[tuple[Span, Marks, NDArray[Any]]]:
    """Each segment with its marks and values."""
    at = 0
    for piece in _segments(spans):
        if len(body) - at < _HEAD.size:
            raise PatchCorrupt(f"the patch ends before its segment at byte {piece.start} of the file")
        marks, values, width, _ = _HEAD.unpack_from(body, at)
        first = at + _HEAD.size
        second = first + _padded(marks * width)
        at = second + _padded(values * piece.width)
        if values > marks or width not in (1, 2) or at > len(body):
            raise PatchCorrupt(f"the patch's segment at byte {piece.start} of the file is no segment")
        if marks:
            yield (
                piece,
                np.frombuffer(body, f"<u{width}", marks, first),
                np.frombuffer(body, f"<u{piece.width}", values, second),
            )
    if at != len(body):
        raise PatchCorrupt(f"the patch goes on for {len(body) - at} bytes after its last segment")


def _apply_segment(target: NDArray[np.uint8], piece: Span, marks: Marks, values: NDArray[Any]) -> None:
    places = np.cumsum(marks, dtype=np.int64)
    if len(marks) != len(values):
        places = places[marks != np.iinfo(marks.dtype).max]
    try:
        _elements(target, piece)[places] = values
    except (IndexError, ValueError) as error:
        raise PatchCorrupt(f"the patch's segment at byte {piece.start} of the file does not fit it: {error}") from error


def _padded(size: int) -> int:
    return size + -size % 8
