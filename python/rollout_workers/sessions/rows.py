"""Turns a session into training rows: pure functions over arrays.

A sampled token that k leaves share is trained once. Its advantage is the mean over its leaves,
which is the same loss as k copies of the token with weight 1/k each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rollout.trajectory.v1.trajectory_pb2 import TrajectoryPath
from rollout_workers.engines.base import VersionSpan
from rollout_workers.sessions.segment import Floats, Ids, InvalidSegment, Mask, Segment
from rollout_workers.sessions.session import Session


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRow:
    """One path of a session, T tokens.

    Example: the leaves ``a`` and ``b`` share a first turn and have advantages 1 and -0.5. The row
    of ``a`` trains on the first turn with advantage 0.25 and on its own last turn with 1. The row
    of ``b`` has mask 0 on the first turn and trains on its last turn with -0.5.
    """

    path: TrajectoryPath
    token_ids: Ids
    """int32 [T]."""
    prompt_length: int
    """Tokens before the first sampled one."""
    loss_mask: Mask
    """uint8 [T]: 1 for the tokens that this row trains. Over all rows, each sampled token once."""
    logprobs: Floats
    """float32 [T]: of the engine; 0 for tokens that were not sampled."""
    advantages: Floats
    """float32 [T]: 0 where ``loss_mask`` is 0."""
    shares: Floats
    """float32 [T]: 1/k for a trained token of k leaves, 0 for others; also where another row trains
    it. The loss of rows that keep every copy is the same with these weights."""
    version_spans: tuple[VersionSpan, ...]
    """Over the completion, without gaps: tokens between two turns belong to the turn after them."""


def training_rows(session: Session, advantages: Mapping[str, float]) -> list[TrainingRow]:
    """One row per leaf, in the order of ``advantages``.

    advantages: leaf segment -> advantage of its trajectory. Leaves that are not named are not
    trained, and do not count in a mean. A leaf may be an inner segment, if an episode ended there.
    Packing (``rollout_workers.trainer.packing``) computes the prefixes that rows share once.

    The rows are exact for losses that sum over tokens (``reduction`` ``token`` and ``constant``),
    not for ratios or means over a whole sample. Raises ``UnknownSegment``, and ``InvalidSegment``
    if a leaf is not the assistant's.
    """
    paths = {leaf: session.path(leaf) for leaf in advantages}
    values: dict[str, list[float]] = {}
    for leaf, path in paths.items():
        if not path[-1].sampled:
            raise InvalidSegment(f"segment {leaf} can't have a reward", fix="name a segment that the policy sampled")
        for segment in path:
            values.setdefault(segment.segment_id, []).append(advantages[leaf])
    trained: set[str] = set()
    rows: list[TrainingRow] = []
    for leaf, path in paths.items():
        rows.append(_row(session.trajectory_path(leaf), path, values, trained))
        trained.update(segment.segment_id for segment in path)
    return rows


def _row(
    path: TrajectoryPath, segments: Sequence[Segment], values: Mapping[str, Sequence[float]], trained: set[str]
) -> TrainingRow:
    masks = [s.loss_mask if s.segment_id not in trained else np.zeros_like(s.loss_mask) for s in segments]
    loss_mask = np.concatenate(masks)
    sizes = [len(segment.token_ids) for segment in segments]
    means = np.repeat([float(np.mean(values[s.segment_id])) for s in segments], sizes)
    shares = np.repeat([1 / len(values[s.segment_id]) for s in segments], sizes) * np.concatenate([s.loss_mask for s in segments])
    logprobs = [s.logprobs if s.sampled else np.zeros(len(s.token_ids), np.float32) for s in segments]
    first = next(at for at, segment in enumerate(segments) if segment.sampled)
    prompt = sum(sizes[:first])
    return TrainingRow(
        path,
        np.concatenate([s.token_ids for s in segments]),
        prompt,
        loss_mask,
        np.concatenate(logprobs),
        (means * loss_mask).astype(np.float32),
        shares.astype(np.float32),
        _spans(segments[first:]),
    )


def _spans(segments: Sequence[Segment]) -> tuple[VersionSpan, ...]:
    spans: list[VersionSpan] = []
    start = at = 0
    for segment in segments:
        for span in segment.version_spans:
            end = at + span.end
            if spans and spans[-1].version == span.version:
                spans[-1] = VersionSpan(span.version, spans[-1].start, end)
            else:
                spans.append(VersionSpan(span.version, start, end))
            start = end
        at += len(segment.token_ids)
    return tuple(spans)
