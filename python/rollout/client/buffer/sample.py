"""Samples as arrays, and as the bytes of a serialized Trajectory, without copies of what is large."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from rollout.client.buffer.wire import prefix
from rollout.errors import RolloutError
from rollout.trajectory.v1.trajectory_pb2 import OUTCOME_COMPLETED, Trajectory

if sys.byteorder != "little":
    raise ImportError("trajectories are little-endian, and so must the machine be")

_SMALL = 16 << 10  # bytes of payload up to which one copy is cheaper than care
_ARRAYS = (0x2A, 0x12, 0x1A, 0x22)  # tags of loss_mask, token_ids, logprobs, raw_logprobs: those of 4-byte numbers last
_TYPES: tuple[np.dtype[Any], ...] = (np.dtype("u1"), np.dtype("<i4"), np.dtype("<f4"), np.dtype("<f4"))
_FOUND = {tag: place for place, tag in enumerate(_ARRAYS)}
_PADS = (b"", b"\x30\x80\x80\x80\x00", b"\x30\x00", b"\x30\x80\x00")
"""By how many bytes are missing to a multiple of 4: prompt_tokens = 0, which the field itself, or its default, stands above."""

_PROMPT_TOKENS = 0x30  # tag of the field behind key and arrays
_EMPTY = (0,)
_NONE: tuple[NDArray[Any], ...] = tuple(np.zeros(0, kind) for kind in _TYPES)

Piece = bytes | memoryview
"""A part of a payload."""


class PayloadCorrupt(RolloutError):
    """A payload that is not the one that was accepted: another checksum, or arrays that don't fit each other."""

    reason: ClassVar[str] = "PAYLOAD_CORRUPT"


def _completed() -> Trajectory:
    return Trajectory(outcome=OUTCOME_COMPLETED)


@dataclass(slots=True, eq=False)
class Sample:
    """One sample of T tokens, prompt first.

    token_ids: int32[T]. logprobs: float32[T] under the distribution that was sampled from, or empty. loss_mask: uint8[T], 1 where
    the token is trained on. raw_logprobs: float32[T] under the unmodified softmax, or empty. about: the rest (reward,
    prompt_tokens, outcome, version_spans, texts), a ``Trajectory`` whose arrays mean nothing, and of whose key a put
    takes the part alone.

    Arrays that a consumer gives are read-only views of a mapped file or of bytes.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, "<f4"))
    loss_mask: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, "u1"))
    raw_logprobs: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, "<f4"))
    about: Trajectory = field(default_factory=_completed)


def told(about: Trajectory) -> bytes:
    """What a sample tells besides its arrays and its key, serialized. Arrays in ``about`` are taken out of it."""
    out = about.SerializeToString(deterministic=True)
    if out and out[0] < _PROMPT_TOKENS:  # it has a field of those before
        for name in ("token_ids", "logprobs", "raw_logprobs", "loss_mask"):
            about.ClearField(name)
        bare = Trajectory()
        bare.CopyFrom(about)
        bare.ClearField("key")
        return bare.SerializeToString(deterministic=True)
    return out


def pieces(sample: Sample, head: bytes) -> list[Piece]:
    """The serialized Trajectory; large arrays are views of the sample's memory. head: its other fields, serialized. Raises
    ``ValueError`` where arrays don't fit.

    Its length is a multiple of 4 and, up to half a million tokens, so is the place of each large array of numbers of 4 bytes: in
    a file of such payloads they are all aligned, and what computes on a mapped one needs no copy.
    """
    mask, ids, logprobs, raw = arrays = (sample.loss_mask, sample.token_ids, sample.logprobs, sample.raw_logprobs)
    for dtype, array in zip(_TYPES, cast("tuple[Any, ...]", arrays), strict=True):
        if not isinstance(array, np.ndarray):
            kind = type(array).__name__
            raise ValueError(f"a {kind} stands where an array of {dtype} is wanted; make it with np.array(.., np.{dtype})")
    tokens = len(ids)
    if (
        len(mask) == len(logprobs) == tokens
        and 0 < 4 * tokens <= _SMALL
        and mask.dtype is _TYPES[0]
        and ids.dtype is _TYPES[1]
        and logprobs.dtype is _TYPES[2]
        and mask.ndim == ids.ndim == logprobs.ndim == 1
        and raw.shape == _EMPTY
    ):  # as most are
        before, total = _before(tokens)
        pad = _PADS[-(total + len(head)) & 3]
        return [b"".join((pad, head, before[0], mask.tobytes(), before[1], ids.tobytes(), before[2], logprobs.tobytes()))]
    fields: list[tuple[bytes, NDArray[Any], int]] = []
    total = len(head)
    for tag, dtype, array in zip(_ARRAYS, _TYPES, arrays, strict=True):
        shape, kind = array.shape, array.dtype
        if shape == _EMPTY:
            continue
        if kind != dtype or shape != (tokens,):
            raise ValueError(f"an array of {kind}{list(shape)} stands where {dtype}[{tokens}] is wanted")
        size = tokens * dtype.itemsize
        start = prefix(tag, size)
        fields.append((start, array, size))
        total += len(start) + size
    held: list[Piece] = [_PADS[-total & 3], head]
    out: list[Piece] = []
    for start, array, size in fields:
        held.append(start)
        if size <= _SMALL:
            held.append(array.tobytes())
        else:
            out += b"".join(held), np.ascontiguousarray(array).data.cast("B")
            held.clear()
    if held:
        out.append(b"".join(held))
    return out


@lru_cache(4096)
def _before(tokens: int) -> tuple[tuple[bytes, bytes, bytes], int]:
    """What precedes mask, ids and logprobs of so many tokens, and the bytes of all six."""
    out = prefix(_ARRAYS[0], tokens), prefix(_ARRAYS[1], 4 * tokens), prefix(_ARRAYS[2], 4 * tokens)
    return out, sum(map(len, out)) + 9 * tokens


def parse(payload: memoryview) -> Sample:
    """The sample of a serialized Trajectory; large arrays are views of the payload. Raises :class:`PayloadCorrupt`."""
    try:
        if len(payload) <= _SMALL:
            about = Trajectory.FromString(bytes(payload))
            mask, ids, logprobs, raw = about.loss_mask, about.token_ids, about.logprobs, about.raw_logprobs
        else:
            (mask, ids, logprobs, raw), rest = _walk(payload)
            about = Trajectory.FromString(rest)
        u1, i4, f4, _ = _TYPES
        out = Sample(
            np.frombuffer(ids, i4) if ids else _NONE[1],
            np.frombuffer(logprobs, f4) if logprobs else _NONE[2],
            np.frombuffer(mask, u1) if mask else _NONE[0],
            np.frombuffer(raw, f4) if raw else _NONE[3],
            about,
        )
    except PayloadCorrupt:
        raise
    except Exception as error:
        raise PayloadCorrupt(f"a payload of {len(payload)} bytes is no Trajectory: {error}") from error
    size, prompt = len(ids), about.prompt_tokens
    if size == len(logprobs) == 4 * len(mask) and not raw and 4 * prompt <= size:  # as most are
        return out
    if size < 4 * prompt or len(logprobs) not in (0, size) or len(raw) not in (0, size) or 4 * len(mask) not in (0, size):
        sizes = f"{size // 4} tokens, {len(logprobs) // 4} logprobs, {len(raw) // 4} raw ones, {len(mask)} mask values"
        raise PayloadCorrupt(f"{sizes} and a prompt of {prompt} don't fit each other")
    return out


def _walk(payload: memoryview) -> tuple[Sequence[Any], bytes]:
    """The array fields as views, and all other fields together as they stand."""
    found: list[Any] = [b"", b"", b"", b""]
    rest = bytearray()
    at = other = 0  # where the other fields begin that are not in rest yet
    end = len(payload)
    while at < end:
        start = at
        tag, at = payload[at], at + 1
        if tag > 127:
            tag, at = _varint(payload, start)
        kind = tag & 7
        if kind == 2:
            size, begin = payload[at], at + 1
            if size > 127:
                size, begin = _varint(payload, at)
            at = begin + size
            if (place := _FOUND.get(tag)) is not None:
                found[place] = payload[begin:at]
                rest += payload[other:start]
                other = at
        elif kind == 0:
            at += 1
            if payload[at - 1] > 127:
                _, at = _varint(payload, at - 1)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise PayloadCorrupt(f"wire type {kind} at byte {start}")
        if at > end:
            raise PayloadCorrupt(f"a field runs {at - end} bytes past the end")
    rest += payload[other:]
    return found, bytes(rest)


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise PayloadCorrupt(f"a number at byte {at} does not end")
