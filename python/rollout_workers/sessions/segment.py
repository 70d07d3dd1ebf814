"""Segments of a session, in memory and as the messages of ``rollout.session.v1``."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import crc32c
import numpy as np
from numpy.typing import NDArray

from rollout.errors import RolloutError
from rollout.session.v1 import session_pb2 as pb
from rollout.trajectory.v1.trajectory_pb2 import VersionSpan as WireSpan
from rollout_workers.engines.base import SampleOutput, VersionSpan
from rollout_workers.sessions.messages import Message

Ids: TypeAlias = NDArray[np.int32]
Floats: TypeAlias = NDArray[np.float32]
Mask: TypeAlias = NDArray[np.uint8]
Role: TypeAlias = pb.Role.ValueType
Fork: TypeAlias = pb.ForkReason.ValueType

if sys.byteorder != "little":
    raise ImportError("segments are little-endian; big-endian machines are not supported")


class InvalidSegment(RolloutError):
    """A segment whose fields disagree with each other or with its session."""

    reason: ClassVar[str] = "INVALID_SEGMENT"


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """A turn of the policy, N tokens.

    token_ids int32[N]: as sampled, with the end token if the engine returned it. logprobs f32[N].
    raw_logprobs f32[N]: None if the engine reports one logprob per token. version_spans: cover [0,
    N). trained: false for a turn that was aborted. message: what the client was sent, if it is not
    simply the text of the tokens.
    """

    token_ids: Ids
    logprobs: Floats
    raw_logprobs: Floats | None = None
    version_spans: tuple[VersionSpan, ...] = ()
    trained: bool = True
    message: Message | None = None

    @classmethod
    def of(cls, output: SampleOutput, message: Message | None = None) -> Sampled:
        """The turn that an engine sampled."""
        return cls(
            output.token_ids,
            output.logprobs,
            output.raw_logprobs,
            tuple(span for span in output.version_spans if span.end > span.start),
            trained=output.finish_reason in ("stop", "length"),
            message=message,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Consecutive tokens of one role, N of them; see ``rollout.session.v1.Segment``. messages: what
    they say; none if it is not a chat. tools: of a root, as a JSON list.

    Segments of other roles than the assistant's have no logprobs and no version spans, and a mask
    of zeros.
    """

    segment_id: str
    session_id: str
    parent: str
    fork: Fork
    role: Role
    token_ids: Ids
    loss_mask: Mask
    logprobs: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    raw_logprobs: Floats | None = None
    version_spans: tuple[VersionSpan, ...] = ()
    messages: tuple[Message, ...] = ()
    tools: str = ""

    def __post_init__(self) -> None:
        size = len(self.token_ids)
        for name, array, sizes in (
            ("loss_mask", self.loss_mask, (size,)),
            ("logprobs", self.logprobs, (size,) if self.sampled else (0,)),
            ("raw_logprobs", self.raw_logprobs, (size,) if self.sampled else (0,)),
        ):
            if array is not None and len(array) not in sizes:
                raise InvalidSegment(f"segment {self.segment_id}: {name} has {len(array)} values, expected {sizes[0]}")
        at = 0
        for span in self.version_spans:
            if span.start != at or span.end <= span.start:
                raise InvalidSegment(
                    f"segment {self.segment_id}: a version span is [{span.start}, {span.end}), expected one that starts at {at}"
                )
            at = span.end
        if self.version_spans and (at != size or not self.sampled):
            raise InvalidSegment(f"segment {self.segment_id}: version spans cover {at} of {size} tokens")

    @property
    def sampled(self) -> bool:
        """Whether the policy wrote it."""
        return self.role == pb.ROLE_ASSISTANT

    def same(self, other: Segment) -> bool:
        """Whether both are the same node with the same arrays. Concurrent requests may have found
        other reasons for their fork."""
        mine, others = self.to_proto(), other.to_proto()
        mine.fork_reason = others.fork_reason
        return mine == others

    def to_proto(self) -> pb.Segment:
        """The message with its tokens inline."""
        inline = pb.SegmentTokens(
            token_ids=self.token_ids.astype("<i4", copy=False).tobytes(),
            logprobs=self.logprobs.astype("<f4", copy=False).tobytes(),
            raw_logprobs=b"" if self.raw_logprobs is None else self.raw_logprobs.astype("<f4", copy=False).tobytes(),
            loss_mask=self.loss_mask.astype(np.uint8, copy=False).tobytes(),
        )
        return pb.Segment(
            segment_id=self.segment_id,
            session_id=self.session_id,
            parent_segment_id=self.parent,
            fork_reason=self.fork,
            role=self.role,
            tokens=len(self.token_ids),
            version_spans=[WireSpan(version=s.version, start=s.start, end=s.end) for s in self.version_spans],
            inline=inline,
            crc32c=crc32c.crc32c(inline.SerializeToString(deterministic=True)),
            messages=[json.dumps(message, ensure_ascii=False) for message in self.messages],
            tools=self.tools,
        )

    @classmethod
    def from_proto(cls, message: pb.Segment) -> Segment:
        """The segment of a message with inline tokens. Raises ``InvalidSegment``."""
        if not message.HasField("inline"):
            raise InvalidSegment(
                f"segment {message.segment_id} has no inline tokens", fix=f"read {message.tokens_ref or 'its tokens'} first"
            )
        inline = message.inline
        if message.crc32c and message.crc32c != crc32c.crc32c(inline.SerializeToString(deterministic=True)):
            raise InvalidSegment(f"segment {message.segment_id}: the checksum of its tokens differs from crc32c")
        for name, data, width in (
            ("token_ids", inline.token_ids, 4),
            ("logprobs", inline.logprobs, 4),
            ("raw_logprobs", inline.raw_logprobs, 4),
            ("loss_mask", inline.loss_mask, 1),
        ):
            if len(data) % width:
                raise InvalidSegment(f"segment {message.segment_id}: {name} has {len(data)} bytes, not a multiple of {width}")
        ids = np.frombuffer(inline.token_ids, "<i4")
        if len(ids) != message.tokens:
            raise InvalidSegment(f"segment {message.segment_id} has {len(ids)} token ids, expected {message.tokens}")
        return cls(
            message.segment_id,
            message.session_id,
            message.parent_segment_id,
            message.fork_reason,
            message.role,
            ids,
            np.frombuffer(inline.loss_mask, np.uint8),
            np.frombuffer(inline.logprobs, "<f4"),
            np.frombuffer(inline.raw_logprobs, "<f4") if inline.raw_logprobs else None,
            tuple(VersionSpan(s.version, s.start, s.end) for s in message.version_spans),
            tuple(_message(message.segment_id, text) for text in message.messages),
            message.tools,
        )


def _message(segment_id: str, text: str) -> Message:
    try:
        message = json.loads(text)
    except ValueError as error:
        raise InvalidSegment(f"segment {segment_id}: a message is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise InvalidSegment(f"segment {segment_id}: a message is not a JSON object")
    return message
