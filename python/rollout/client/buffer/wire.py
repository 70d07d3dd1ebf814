"""The bytes of put requests, as protobuf would serialize them, without a message object for each sample.

A request holds its puts, a put its envelopes, an envelope a header, a checksum and the payload or its place. What many samples
have in common is serialized once; messages that stand in a row are one message with the fields of all.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache

from rollout.trajectory.v1.trajectory_pb2 import Trajectory, TrajectoryHeader
from rollout.weights.v1.weights_pb2 import WeightsReceipt

_CRC = struct.Struct("<BI")  # TrajectoryEnvelope.crc32c
_CRC_TAG = 0x25
PAYLOAD, PLACE = 0x12, 0x2A  # tags of a TrajectoryEnvelope
_USUAL = 32  # bytes of what samples tell that many others tell too: outcome, reward, length of the prompt


@lru_cache(4096)
def prefix(tag: int, size: int) -> bytes:
    """What precedes a field of ``size`` bytes, or the field itself where it is a number."""
    out = bytearray((tag,))
    while size > 127:
        out.append(size & 127 | 128)
        size >>= 7
    out.append(size)
    return bytes(out)


def key_of(group: bytes, sample: int, part: int) -> bytes:
    """A ``TrajectoryKey``. group: the serialized one of its group."""
    if sample:
        group += prefix(0x28, sample)
    return group + prefix(0x30, part) if part else group


def header_of(about: Trajectory, told: bytes, tokens: int, group_size: int) -> bytes:
    """A ``TrajectoryHeader`` without key and receipt. told: ``about``, serialized. tokens: of prompt and completion."""
    return _usual(told, tokens, group_size) if len(told) <= _USUAL else _header(about, tokens, group_size)


@lru_cache(4096)
def _usual(told: bytes, tokens: int, group_size: int) -> bytes:
    return _header(Trajectory.FromString(told), tokens, group_size)


def _header(about: Trajectory, tokens: int, group_size: int) -> bytes:
    header = TrajectoryHeader(group_size=group_size, tokens=tokens, completion_tokens=tokens - about.prompt_tokens)
    header.outcome = about.outcome
    if about.reward:
        header.reward = about.reward
    if about.reason:
        header.reason = about.reason
    if spans := about.version_spans:
        versions = [span.version for span in spans]
        header.min_version, header.max_version = min(versions), max(versions)
    return header.SerializeToString()


def receipt_of(receipt: WeightsReceipt | None) -> bytes:
    """The receipt, as a part of a ``TrajectoryHeader``."""
    return TrajectoryHeader(receipt=receipt).SerializeToString() if receipt is not None else b""


def head_of(header: bytes, crc: int) -> bytes:
    """A ``TrajectoryEnvelope`` that lacks payload and place."""
    return prefix(0x0A, len(header)) + header + _CRC.pack(_CRC_TAG, crc)


def batch_of(heads: Iterable[bytes], field: int, parts: Iterable[bytes]) -> bytes:
    """A ``TrajectoryBatch``, whose envelopes have what they lack. field: ``PAYLOAD``, or ``PLACE`` with serialized
    ``PayloadPlace`` messages."""
    out: list[bytes] = []
    for head, part in zip(heads, parts, strict=True):
        tag = prefix(field, len(part))
        out += prefix(0x0A, len(head) + len(tag) + len(part)), head, tag, part
    return b"".join(out)


def request_of(run: bytes, puts: Iterable[bytes], rest: bytes) -> list[bytes]:
    """A ``PutTrajectoriesRequest`` in pieces. run: its field. rest: its other fields, serialized."""
    out = [run]
    for put in puts:
        out += prefix(0x12, len(put)), put
    out.append(rest)
    return out
