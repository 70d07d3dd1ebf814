"""The layout of a safetensors file: where its tensors begin, and how wide their elements are."""

from __future__ import annotations

import json
import struct
from typing import Any

from rollout_workers.kernels.segments_numpy import Span

_ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


def read_layout(file: Any) -> tuple[bytes, list[Span]]:
    """The bytes before the tensors, and the tensors as spans in the order of their bytes. file: a
    buffer of bytes.

    Raises ``ValueError`` if it is not a complete safetensors file.
    """
    view = memoryview(file).cast("B")
    size = struct.unpack_from("<Q", view)[0] if len(view) >= 8 else 0
    if not 2 <= size <= len(view) - 8:
        raise ValueError(f"not a safetensors file: {len(view)} bytes with a header of {size}")
    head = bytes(view[: 8 + size])
    try:
        entries = [entry for name, entry in json.loads(head[8:]).items() if name != "__metadata__"]
        places = sorted((*map(int, entry["data_offsets"]), _ITEM_BYTES[entry["dtype"]]) for entry in entries)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the header is not a safetensors header: {error!r}") from error
    spans: list[Span] = []
    at = 0
    for start, stop, width in places:
        if start != at or stop < start or (stop - start) % width:
            raise ValueError(f"a tensor is at {start} to {stop}, but the next should begin at {at}")
        count = (stop - start) // width
        if spans and spans[-1].width == width:
            spans[-1] = Span(spans[-1].start, width, spans[-1].count + count)
        elif count:
            spans.append(Span(len(head) + start, width, count))
        at = stop
    if len(head) + at != len(view):
        raise ValueError(f"{len(view)} bytes, but the header describes {len(head) + at}")
    return head, spans
