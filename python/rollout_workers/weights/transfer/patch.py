"""Patches: the values of one version of the weights that differ from another's, with their places.

Between two steps few values of a model in bf16 change: one in a hundred is usual. A patch holds the
distance from one changed element to the next, and the new values, which are written over the old
ones. Format, little-endian:

    "RWPATCH1" | u32 length | header (JSON, padded to 8 bytes) | segment ... | u32 CRC-32C of all before
    segment = u32 marks | u32 values | u32 bytes a mark | u32 0 | mark ... | value ...     (marks and values padded to 8 bytes)

The header has both versions and digests, the size of the file, and the CRC-32C of the bytes before
the tensors: base and result are safetensors files with the same names, types, and shapes. A segment
covers 2^18 elements of equal width, in the order of the file. A mark is the distance to the next
changed element (to the first one, from the segment's beginning); its highest value moves that many
elements forward without a value. Elements are compared by their bytes. ``kernels.segments``
encodes, validates, and applies segments in C or numpy, with the same bytes.
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
from rollout_workers.kernels.segments import segment_codec
from rollout_workers.kernels.segments_numpy import SEGMENT, Span
from rollout_workers.weights.transfer.layout import read_layout

MAGIC = b"RWPATCH1"
_PIECE = 16 * SEGMENT  # elements that one thread takes at a time


class PatchCorrupt(RolloutError):
    """The bytes are not a complete patch, or a patch for another file."""

    reason: ClassVar[str] = "WEIGHTS_PATCH_CORRUPT"


@dataclass(frozen=True, slots=True)
class PatchHead:
    """The header of a patch. base_version, base_digest: of the base; version, digest: of the
    result.

    file_bytes: of either file. layout: CRC-32C of what stands before the tensors. changed: values
    in it.
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
    """The patch that makes file ``wanted`` of file ``base`` (buffers); None if it is larger than
    ``most_bytes``, or if the tensors of the files differ. Raises ``ValueError`` for a file that is
    not safetensors."""
    head, spans = read_layout(base)
    other, _ = read_layout(wanted)
    if head != other:
        return None
    old, new = np.frombuffer(base, np.uint8), np.frombuffer(wanted, np.uint8)
    segments = segment_codec()
    body: list[bytes] = []
    size = changed = 0
    with ThreadPoolExecutor(threads) as pool:
        for part, values in (pool.map if threads > 1 else map)(lambda piece: segments.encode(old, new, piece), _pieces(spans)):
            body.append(part)
            size += len(part)
            changed += values
            if size > most_bytes:
                pool.shutdown(cancel_futures=True)
                return None
    made = PatchHead(**asdict(ends), file_bytes=len(new), layout=crc32c.crc32c(head), changed=changed)
    text = json.dumps(asdict(made), separators=(",", ":")).encode()
    text += b" " * (-(len(MAGIC) + 4 + len(text)) % 8)
    parts = [MAGIC, struct.pack("<I", len(text)), text, *body]
    check = 0
    for part in parts:
        check = crc32c.crc32c(part, check)
    return b"".join([*parts, struct.pack("<I", check)])


def read_head(patch: Any) -> PatchHead:
    """The header of a patch, after validating its checksum. Raises :class:`PatchCorrupt`."""
    return _open(patch)[0]


def apply(patch: Any, file: Any, *, threads: int = 1) -> PatchHead:
    """Write a patch's values over those of ``file`` (a writable buffer that holds the base's
    bytes).

    The caller must compare the weights digest of the result, and not change ``patch`` during the
    call. Raises :class:`PatchCorrupt`, without having written anything, if the patch is incomplete
    or for a file of another layout.
    """
    head, view = _open(patch)
    try:
        before, spans = read_layout(file)
    except ValueError as error:
        raise PatchCorrupt(f"the patch is for another file: {error}") from error
    if len(memoryview(file)) != head.file_bytes or crc32c.crc32c(before) != head.layout:
        raise PatchCorrupt("the patch is for a file with other tensors")
    target, body = np.frombuffer(file, np.uint8), np.frombuffer(view, np.uint8)
    segments = segment_codec()
    work: list[tuple[NDArray[np.uint64], Span]] = []
    at = 0
    for span in spans:  # validate everything before writing
        places, at = segments.check(body, at, span)
        if at < 0:
            raise PatchCorrupt(
                f"the patch's segment at byte {span.start + (-1 - at) * SEGMENT * span.width} of the file does not fit it"
            )
        each = _PIECE // SEGMENT
        work += [(places[each * n : each * (n + 1)], piece) for n, piece in enumerate(_pieces([span]))]
    if at != len(body):
        raise PatchCorrupt(f"the patch has {len(body) - at} bytes after its last segment")
    with ThreadPoolExecutor(threads) as pool:
        for _ in (pool.map if threads > 1 else map)(lambda part: segments.write(target, body, *part), work):
            pass
    return head


def _pieces(spans: Iterable[Span]) -> Iterator[Span]:
    """Units of work for a thread: whole segments of one span."""
    for span in spans:
        for first in range(0, span.count, _PIECE):
            yield Span(span.start + first * span.width, span.width, min(_PIECE, span.count - first))


def _open(patch: Any) -> tuple[PatchHead, memoryview]:
    """The header, and the segments."""
    view = memoryview(patch).cast("B")
    least = len(MAGIC) + 4
    if len(view) < least + 4 or bytes(view[: len(MAGIC)]) != MAGIC:
        raise PatchCorrupt(f"{len(view)} bytes that do not begin like a patch")
    (recorded,) = struct.unpack("<I", view[-4:])
    if crc32c.crc32c(view[:-4]) != recorded:
        raise PatchCorrupt("the checksum of the patch does not match: it was truncated or changed")
    (size,) = struct.unpack_from("<I", view, len(MAGIC))
    try:
        head = PatchHead(**json.loads(bytes(view[least : least + size])))
    except (ValueError, TypeError) as error:
        raise PatchCorrupt(f"the patch's header cannot be read: {error!r}") from error
    return head, view[least + size : -4]
