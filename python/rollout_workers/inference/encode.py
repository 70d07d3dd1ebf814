"""Finished samples as trajectory envelopes: raw little-endian arrays, the same bytes for the same sample."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import google_crc32c
import numpy as np

from rollout.run.v1.run_pb2 import PromptGroup
from rollout.trajectory.v1 import trajectory_pb2 as pb
from rollout_workers.engines.base import SampleOutput
from rollout_workers.harness.environment import Refusal
from rollout_workers.harness.episode import Episode, FinishedGroup
from rollout_workers.harness.supervised import Example
from rollout_workers.inference.receipt import Holdings

INLINE_BYTES = 256 << 10
_OUTCOMES: dict[str, pb.Outcome.ValueType] = {
    "completed": pb.OUTCOME_COMPLETED,
    "truncated": pb.OUTCOME_TRUNCATED,
    "aborted": pb.OUTCOME_ABORTED,
    "infra_failed": pb.OUTCOME_INFRA_FAILED,
}
if sys.byteorder != "little":
    raise ImportError("trajectories are little-endian, and so must the worker's machine be")


def encode_group(group: PromptGroup, finished: FinishedGroup, holdings: Holdings, worker: str) -> list[pb.TrajectoryEnvelope]:
    """One envelope an episode. worker: the worker's id, which stands in the header alone."""
    prompt = finished.episodes[0].prompt.token_ids if finished.episodes else np.zeros(0, np.int32)
    head = _Head(prompt)
    return [_encode_episode(group, episode, head, holdings, worker) for episode in finished.episodes]


class _Head:
    """What the samples of a group share."""

    def __init__(self, prompt: np.ndarray) -> None:
        self.tokens = len(prompt)
        self.ids = prompt.astype(np.int32, copy=False).tobytes()
        self.zeros = bytes(4 * self.tokens)
        self.mask = bytes(self.tokens)


def _encode_episode(group: PromptGroup, episode: Episode, head: _Head, holdings: Holdings, worker: str) -> pb.TrajectoryEnvelope:
    result = episode.result
    assert result is not None
    trained = result.outcome in ("completed", "truncated")
    ids, logprobs, raw, mask = [head.ids], [head.zeros], [head.zeros], [head.mask]
    completion = 0
    for part in episode.parts:
        size = len(part.token_ids)
        completion += size
        ids.append(part.token_ids.tobytes())
        if isinstance(part, SampleOutput):
            logprobs.append(part.logprobs.tobytes())
            raw.append(part.raw_logprobs.tobytes())
            mask.append((b"\1" if trained else b"\0") * size)
        else:
            logprobs.append(bytes(4 * size))
            raw.append(bytes(4 * size))
            mask.append(bytes(size))
    spans = episode.spans()
    key = _key(group, episode.sample)
    outcome = _OUTCOMES[result.outcome]
    payload = pb.Trajectory(
        key=key,
        token_ids=b"".join(ids),
        logprobs=b"".join(logprobs),
        raw_logprobs=b"".join(raw),
        loss_mask=b"".join(mask),
        prompt_tokens=head.tokens,
        version_spans=[
            pb.VersionSpan(version=s.version, start=s.start, end=s.end, digest=_digest(holdings, s.version)) for s in spans
        ],
        reward=result.reward,
        metrics=result.metrics,
        outcome=outcome,
        reason=result.reason,
        prompt=episode.prompt.text,
        completion="".join(episode.texts),
    ).SerializeToString(deterministic=True)
    receipt = holdings.of(spans[-1].version if spans else None)
    versions = [s.version for s in spans] or [receipt.version]
    header = pb.TrajectoryHeader(
        key=key,
        group_size=group.group_size,
        outcome=outcome,
        reason=result.reason,
        reward=result.reward,
        min_version=min(versions),
        max_version=max(versions),
        receipt=receipt,
        tokens=head.tokens + completion,
        completion_tokens=completion,
        worker_id=worker,
        row=group.row,
    )
    return pb.TrajectoryEnvelope(header=header, payload=payload, crc32c=google_crc32c.value(payload))


def encode_row(group: PromptGroup, made: Sequence[Example] | Example | Refusal, worker: str) -> list[pb.TrajectoryEnvelope]:
    """A row of data, one envelope an example; a row that was refused is so in all that its group wants."""
    if isinstance(made, Refusal):
        return [encode_example(group, made, worker, sample) for sample in range(group.group_size)]
    examples = [made] if isinstance(made, Example) else made
    return [encode_example(group, example, worker, sample) for sample, example in enumerate(examples)]


def encode_example(group: PromptGroup, example: Example | Refusal, worker: str, sample: int = 0) -> pb.TrajectoryEnvelope:
    """An example: no logprobs, no versions, no receipt. A refusal is INFRA_FAILED with its reason."""
    key = _key(group, sample)
    if isinstance(example, Refusal):
        trajectory = pb.Trajectory(key=key, outcome=pb.OUTCOME_INFRA_FAILED, reason=example.reason)
        tokens = answer = 0
    else:
        tokens = len(example.token_ids)
        answer = tokens - example.prompt_tokens
        trajectory = pb.Trajectory(
            key=key,
            token_ids=example.token_ids.tobytes(),
            logprobs=bytes(4 * tokens),
            raw_logprobs=bytes(4 * tokens),
            loss_mask=example.loss_mask.tobytes(),
            prompt_tokens=example.prompt_tokens,
            reward=example.reward,
            outcome=pb.OUTCOME_COMPLETED,
            prompt=example.prompt,
            completion=example.answer,
        )
    payload = trajectory.SerializeToString(deterministic=True)
    header = pb.TrajectoryHeader(
        key=key,
        group_size=group.group_size,
        outcome=trajectory.outcome,
        reason=trajectory.reason,
        reward=trajectory.reward,
        tokens=tokens,
        completion_tokens=answer,
        worker_id=worker,
        row=group.row,
    )
    return pb.TrajectoryEnvelope(header=header, payload=payload, crc32c=google_crc32c.value(payload))


def in_messages(envelopes: Iterable[pb.TrajectoryEnvelope], most_bytes: int) -> list[pb.TrajectoryBatch]:
    """Envelopes as messages of at most ``most_bytes``. Each envelope must fit by itself."""
    batches: list[pb.TrajectoryBatch] = []
    held: list[pb.TrajectoryEnvelope] = []
    size = 0
    for envelope in envelopes:
        cost = len(envelope.payload) + len(envelope.payload_ref) + 1024
        if held and size + cost > most_bytes:
            batches.append(pb.TrajectoryBatch(trajectories=held))
            held, size = [], 0
        held.append(envelope)
        size += cost
    if held:
        batches.append(pb.TrajectoryBatch(trajectories=held))
    return batches


def _digest(holdings: Holdings, version: int) -> str:
    """What the engine computed from the weights of a version; empty where that is forgotten."""
    receipt = holdings.of(version)
    return receipt.digest if receipt.version == version else ""


def _key(group: PromptGroup, sample: int) -> pb.TrajectoryKey:
    return pb.TrajectoryKey(run_id=group.run_id, epoch=group.epoch, index=group.index, attempt=group.attempt, sample=sample)


def large(envelopes: Sequence[pb.TrajectoryEnvelope]) -> list[pb.TrajectoryEnvelope]:
    """Those whose payload must travel by reference."""
    return [envelope for envelope in envelopes if len(envelope.payload) > INLINE_BYTES]
