"""Why a history left a path of its session."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.session.v1 import session_pb2 as pb
from rollout_workers.sessions.messages import Canonical

_SIMILAR = 0.5
"""Share of common words from which a changed message is an edit of the old one, not a summary."""


def fork_reason(known: Sequence[Canonical], said: Sequence[Canonical], matched: int) -> pb.ForkReason.ValueType:
    """known: the messages of the path. said: the history, whose first ``matched`` messages are on
    the path.

    ``RESAMPLED`` if the whole history is; ``SUBAGENT`` if a history starts with other instructions;
    ``HISTORY_COMPACTED`` if messages of the path are missing and later ones are still there, or if
    another text replaces the assistant's turns, of which there were several; otherwise
    ``HISTORY_EDITED``.
    """
    if matched == len(said):
        return pb.FORK_REASON_RESAMPLED
    left, lost = said[matched:], known[matched:]
    if not matched and known and _instructions(known) != _instructions(said):
        return pb.FORK_REASON_SUBAGENT
    if not lost:
        return pb.FORK_REASON_HISTORY_EDITED
    if any(_starts_later(left[at:], lost, at) for at in range(min(2, len(left)))):
        return pb.FORK_REASON_HISTORY_COMPACTED
    if _turns(lost) > 1 and not _turns(said) and not _similar(left[0].text, lost[0].text):
        return pb.FORK_REASON_HISTORY_COMPACTED
    return pb.FORK_REASON_HISTORY_EDITED


def _instructions(messages: Sequence[Canonical]) -> str | None:
    return messages[0].text if messages[0].role == "system" else None


def _turns(messages: Sequence[Canonical]) -> int:
    return sum(message.role == "assistant" for message in messages)


def _starts_later(left: Sequence[Canonical], lost: Sequence[Canonical], at: int) -> bool:
    """Whether ``left`` starts with a message that the path has further on than ``at``."""
    return any(message == left[0] for message in lost[at + 1 :])


def _similar(one: str, other: str) -> bool:
    words, others = set(one.lower().split()), set(other.lower().split())
    return len(words & others) >= _SIMILAR * len(words | others)
