"""Samples as arrays, and as the bytes of a serialized Trajectory, without copies of what is large."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

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

_EMPTY = (0,)

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
    prompt_tokens, outcome, version_spans, texts), a ``Trajectory`` whose key a put fills in and whose arrays mean nothing.

    Arrays that a consumer gives are read-only views of a mapped file or of bytes.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, "<f4"))
    loss_mask: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, "u1"))
    raw_logprobs: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, "<f4"))
    about: Trajectory = field(default_factory=_completed)


def pieces(sample: Sample) -> list[Piece]:
    """The serialized Trajectory; large arrays are views of the sample's memory. Raises ``ValueError`` where arrays don't fit.

    Its length is a multiple of 4 and, up to half a million tokens, so is the place of each large array of numbers of 4 bytes: in
    a file of such payloads they are all aligned, and what computes on a mapped one needs no copy.
    """
    tokens = len(sample.token_ids)
    if sample.about.token_ids:  # of a sample that was read
        for name in ("token_ids", "logprobs", "raw_logprobs", "loss_mask"):
            sample.about.ClearField(name)
    about = sample.about.SerializeToString(deterministic=True)
    fields: list[tuple[bytes, NDArray[Any], int]] = []
    total = len(about)
    arrays = (sample.loss_mask, sample.token_ids, sample.logprobs, sample.raw_logprobs)
    for tag, dtype, array in zip(_ARRAYS, _TYPES, arrays, strict=True):
        shape, kind = array.shape, array.dtype
        if shape == _EMPTY:
            continue
        if (kind is not dtype and kind != dtype) or shape != (tokens,):
            raise ValueError(f"an array of {kind}{list(shape)} stands where {dtype}[{tokens}] is wanted")
        size = tokens * dtype.itemsize
        prefix = _prefix(tag, size)
        fields.append((prefix, array, size))
        total += len(prefix) + size
    held: list[Piece] = [_PADS[-total & 3], about]
    out: list[Piece] = []
    for prefix, array, size in fields:
        held.append(prefix)
        if size <= _SMALL:
            held.append(array.tobytes())
        else:
            out += b"".join(held), np.ascontiguousarray(array).data.cast("B")
            held.clear()
    if held:
        out.append(b"".join(held))
    return out


@lru_cache(4096)
def _prefix(tag: int, size: int) -> bytes:
    """What precedes a field of ``size`` bytes."""
    out = bytearray((tag,))
    while size > 127:
        out.append(size & 127 | 128)
        size >>= 7
    out.append(size)
    return bytes(out)


def parse(payload: memoryview) -> Sample:
    """The sample of a serialized Trajectory; large arrays are views of the payload. Raises :class:`PayloadCorrupt`."""
    try:
        if len(payload) <= _SMALL:
            about = Trajectory.FromString(bytes(payload))
            found = (about.loss_mask, about.token_ids, about.logprobs, about.raw_logprobs)
        else:
            found, rest = _walk(payload)
            about = Trajectory.FromString(rest)
        mask, ids, logprobs, raw = map(_view, found, _TYPES)
    except PayloadCorrupt:
        raise
    except Exception as error:
        raise PayloadCorrupt(f"a payload of {len(payload)} bytes is no Trajectory: {error}") from error
    fit = (0, len(ids))
    if len(ids) < about.prompt_tokens or len(logprobs) not in fit or len(raw) not in fit or len(mask) not in fit:
        sizes = f"{len(ids)} tokens, {len(logprobs)} logprobs, {len(raw)} raw ones, {len(mask)} mask values"
        raise PayloadCorrupt(f"{sizes} and a prompt of {about.prompt_tokens} don't fit each other")
    return Sample(ids, logprobs, mask, raw, about)


def _view(data: Any, kind: np.dtype[Any]) -> NDArray[Any]:
    return np.frombuffer(data, kind) if len(data) else np.zeros(0, kind)


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
