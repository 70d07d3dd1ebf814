"""Encodes episodes of tensors as trajectory envelopes, and reads them again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import crc32c
from torch import Tensor

from rollout.outcomes import OUTCOMES
from rollout.run.v1.run_pb2 import PromptGroup
from rollout.trajectory.v1 import trajectory_pb2 as pb
from rollout.weights.v1.weights_pb2 import WeightsReceipt
from rollout_workers.multistep.player import Played
from rollout_workers.multistep.tensors import from_message, to_message


class Receipts(Protocol):
    """Of the weights that the engine of an inference worker has, and had."""

    @property
    def current(self) -> WeightsReceipt: ...

    def digest(self, version: int) -> str: ...

    def of(self, version: int) -> WeightsReceipt: ...


@dataclass(frozen=True, slots=True)
class RecordedReceipts:
    """The :class:`Receipts` of some versions, for other threads."""

    current: WeightsReceipt
    versions: Mapping[int, tuple[WeightsReceipt, str]]

    @classmethod
    def of_episodes(cls, receipts: Receipts, episodes: Sequence[Played]) -> RecordedReceipts:
        """The receipts and digests of the versions that played these episodes."""
        versions = {version for episode in episodes for version in (*episode.versions, receipts.current.version)}
        return cls(receipts.current, {version: (receipts.of(version), receipts.digest(version)) for version in versions})

    def digest(self, version: int) -> str:
        return self.versions[version][1]

    def of(self, version: int) -> WeightsReceipt:
        return self.versions[version][0]


def encode_played(
    group: PromptGroup, episodes: Sequence[Played], receipts: Receipts, worker: str, min_size: int
) -> list[pb.TrajectoryEnvelope]:
    """One envelope per episode. Copies all tensors. worker, min_size: as for ``encode_group``."""
    return [_envelope(group, episode, receipts, worker, min_size) for episode in episodes]


def _envelope(group: PromptGroup, episode: Played, receipts: Receipts, worker: str, min_size: int) -> pb.TrajectoryEnvelope:
    result = episode.result
    assert result is not None
    outcome = OUTCOMES[result.outcome]
    key = pb.TrajectoryKey(
        run_id=group.run_id, epoch=group.epoch, index=group.index, attempt=group.attempt, sample=episode.sample
    )
    trajectory = pb.Trajectory(key=key, reward=result.reward, metrics=result.metrics, outcome=outcome, reason=result.reason)
    trajectory.prompt = group.row_json.decode(errors="replace")
    if episode.tensors:
        trajectory.completion = f"{episode.steps} steps, return {result.reward:g}"
    for name, tensor in episode.tensors.items():
        trajectory.tensors[name].CopyFrom(to_message(tensor))
    for version, start, end in spans(episode.versions if episode.tensors else []):
        trajectory.version_spans.add(version=version, start=start, end=end, digest=receipts.digest(version))
    payload = trajectory.SerializeToString(deterministic=True)
    versions = episode.versions or [receipts.current.version]
    header = pb.TrajectoryHeader(
        key=key,
        group_size=group.group_size,
        outcome=outcome,
        reason=result.reason,
        reward=result.reward,
        min_version=min(versions),
        max_version=max(versions),
        receipt=receipts.of(versions[-1]),
        tokens=episode.steps,
        completion_tokens=episode.steps,
        worker_id=worker,
        row=group.row,
        parts=1,
        left_out=outcome == pb.OUTCOME_INFRA_FAILED and 0 < min_size < group.group_size,
    )
    return pb.TrajectoryEnvelope(header=header, payload=payload, crc32c=crc32c.crc32c(payload))


def spans(versions: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The runs of equal versions: version, first, one past the last.

    >>> list(spans([3, 3, 4]))
    [(3, 0, 2), (4, 2, 3)]
    """
    start = 0
    for place in range(1, len(versions) + 1):
        if place == len(versions) or versions[place] != versions[start]:
            yield versions[start], start, place
            start = place


def tensors_of(trajectory: pb.Trajectory) -> Mapping[str, Tensor]:
    """The tensors of a trajectory by name, in order of names. Raises :class:`BatchInvalid`."""
    return {name: from_message(trajectory.tensors[name]) for name in sorted(trajectory.tensors)}
