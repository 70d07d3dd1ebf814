"""Encodes finished samples as trajectory envelopes. Arrays are raw and little-endian, so that equal
samples have equal bytes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence

import crc32c
import numpy as np

from rollout.environment import Message, Observation, Refusal
from rollout.outcomes import OUTCOMES
from rollout.run.v1.run_pb2 import PromptGroup
from rollout.trajectory.v1 import trajectory_pb2 as pb
from rollout_workers.data.supervised import Example
from rollout_workers.engines.base import SampleOutput
from rollout_workers.environments.episode import Episode, FinishedGroup
from rollout_workers.inference.receipt import EngineReceipts

INLINE_BYTES = 256 << 10
TIMES_BYTES = 4096
"""The largest ``EpisodeTimes``: the ledger stores it in the row of the sample."""
if sys.byteorder != "little":
    raise ImportError("trajectories are little-endian; big-endian machines are not supported")


def encode_group(
    group: PromptGroup, finished: FinishedGroup, receipts: EngineReceipts, worker: str, min_size: int = 0
) -> list[pb.TrajectoryEnvelope]:
    """One envelope per episode, followed by those of its child sessions. An episode that is not
    trained on has one without them. worker: the worker's id, which only the header contains.
    min_size: usable samples with which the buffer completes the group without failed ones; 0: the
    group needs all. The buffer decides, because the episodes may be only some of the group's."""
    if not finished.episodes:
        return []
    head = _Head(group, finished.episodes[0].prompt, worker)
    envelopes: list[pb.TrajectoryEnvelope] = []
    for episode in finished.episodes:
        children = _children(episode)
        parts = 1 + len(children)
        envelopes.append(_encode_episode(episode, head, receipts, parts))
        for number, child in enumerate(children, 1):
            begun = _Head(group, child.prompt, worker, _link(episode, child))
            envelopes.append(_encode_episode(child, begun, receipts, parts, number))
    if 0 < min_size < group.group_size:
        for envelope in envelopes:
            envelope.header.left_out = envelope.header.outcome == pb.OUTCOME_INFRA_FAILED
    return envelopes


def _children(episode: Episode) -> list[Episode]:
    """The child sessions that are trained on, by number."""
    if episode.result is None or episode.result.outcome not in ("completed", "truncated"):
        return []
    return [child for _, child in sorted(episode.children.items()) if child.turns]


def _link(episode: Episode, child: Episode) -> pb.EpisodeLink:
    assert episode.result is not None
    return pb.EpisodeLink(turn=child.since, child=child.number, rewarded=child.number in episode.result.child_rewards)


class _Head:
    """The fields that the samples of a group share. The messages are reused for one sample after
    another, because creating new ones took most of the time of a short sample."""

    def __init__(self, group: PromptGroup, prompt: Observation, worker: str, parent: pb.EpisodeLink | None = None) -> None:
        self.tokens = len(prompt.token_ids)
        self.ids = prompt.token_ids.astype(np.int32, copy=False).tobytes()
        self.zeros = bytes(4 * self.tokens)
        self.mask = bytes(self.tokens)
        key = _key(group, 0)
        self.trajectory = pb.Trajectory(key=key, prompt_tokens=self.tokens, prompt=prompt.text, parent=parent)
        self.header = pb.TrajectoryHeader(key=key, group_size=group.group_size, worker_id=worker, row=group.row)


def _encode_episode(
    episode: Episode, head: _Head, receipts: EngineReceipts, parts: int, number: int = 0
) -> pb.TrajectoryEnvelope:
    """parts: of the sample. number: of this part."""
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
            raw.append(b"" if part.raw_logprobs is None else part.raw_logprobs.tobytes())
            mask.append((b"\1" if trained else b"\0") * size)
        else:
            logprobs.append(bytes(4 * size))
            raw.append(bytes(4 * size))
            mask.append(bytes(size))
    spans = episode.spans()
    outcome = OUTCOMES[result.outcome]
    trajectory = head.trajectory
    trajectory.key.sample, trajectory.key.part = episode.sample, number
    trajectory.token_ids = b"".join(ids)
    trajectory.logprobs = b"".join(logprobs)
    trajectory.raw_logprobs = b"".join(raw) if _all_raw(episode) else b""
    trajectory.loss_mask = b"".join(mask)
    del trajectory.version_spans[:]
    for span in spans:
        digest = receipts.digest(span.version)
        trajectory.version_spans.add(version=span.version, start=span.start, end=span.end, digest=digest)
    trajectory.reward = result.reward
    trajectory.metrics.clear()
    for name, value in result.metrics.items():
        trajectory.metrics[name] = value
    trajectory.outcome = outcome
    trajectory.reason = result.reason
    trajectory.completion = "".join(episode.texts)
    trajectory.token_rewards = _by_token(result.token_rewards, head.tokens, completion)
    trajectory.teacher_logprobs = _by_token(result.teacher_logprobs, head.tokens, completion)
    del trajectory.turns[:]
    if episode.clocks:
        trajectory.turns.extend(_turns(episode))
    payload = trajectory.SerializeToString(deterministic=True)

    receipt = receipts.of(spans[-1].version if spans else None)
    versions = [span.version for span in spans] or [receipt.version]
    envelope = pb.TrajectoryEnvelope(payload=payload, crc32c=crc32c.crc32c(payload))
    header = envelope.header
    header.CopyFrom(head.header)
    header.key.sample, header.key.part, header.parts = episode.sample, number, parts
    header.outcome = outcome
    header.reason = result.reason
    header.reward = result.reward
    header.min_version = min(versions)
    header.max_version = max(versions)
    header.receipt.CopyFrom(receipt)
    header.tokens = head.tokens + completion
    header.completion_tokens = completion
    header.token_rewards = bool(trajectory.token_rewards)
    if episode.clocks:
        header.times.CopyFrom(_times(episode))
    return envelope


def _turns(episode: Episode) -> Iterator[pb.Turn]:
    """The prompt and the turns of an episode, with what was said, and the reward of each."""
    first, at = episode.prompt, len(episode.prompt.token_ids)
    yield _read(first, 0, at)
    number = 0
    for part, text in zip(episode.parts, episode.texts, strict=False):  # an output that can't be decoded has no text
        start, at = at, at + len(part.token_ids)
        if not isinstance(part, SampleOutput):
            yield _read(part, start, at)
            continue
        turn = pb.Turn(sampled=True, start=start, end=at)
        if number < len(episode.said):
            turn.messages.append(_json(episode.said[number]))
        else:
            turn.text = text
        if number < len(episode.rewards):
            turn.reward = episode.rewards[number]
        if number < len(episode.turn_metrics):
            turn.metrics.update(episode.turn_metrics[number])
        number += 1
        yield turn


def _read(observation: Observation, start: int, end: int) -> pb.Turn:
    """What the policy read."""
    if observation.messages:
        return pb.Turn(start=start, end=end, messages=map(_json, observation.messages))
    return pb.Turn(start=start, end=end, text=observation.text)


def _json(message: Message) -> str:
    return json.dumps(dict(message), ensure_ascii=False)


def _times(episode: Episode) -> pb.EpisodeTimes:
    """The course of an episode, of at most ``TIMES_BYTES``."""

    def ms(seconds: float) -> int:
        return min(max(0, round(1000 * seconds)), (1 << 32) - 1)

    def since(moment: float) -> int:
        return ms(moment - episode.began) if moment else 0

    times = pb.EpisodeTimes(began_unix_ms=round(1000 * episode.began))
    for clock in episode.clocks:
        tools = [ms(seconds) for seconds in clock.tools]
        turn = times.turns.add(
            asked_ms=since(clock.asked), sampled_ms=since(clock.sampled), answered_ms=since(clock.answered), tool_ms=tools
        )
        if len(tools) > 256 or times.ByteSize() > TIMES_BYTES:
            times.turns.remove(turn)
            break
    return times


def _all_raw(episode: Episode) -> bool:
    """Whether the engine reported raw logprobs."""
    return all(not isinstance(part, SampleOutput) or part.raw_logprobs is not None for part in episode.parts)


def encode_row(group: PromptGroup, made: Sequence[Example] | Example | Refusal, worker: str) -> list[pb.TrajectoryEnvelope]:
    """One envelope per example of a row. If the row was refused, all samples of its group get the
    refusal."""
    if isinstance(made, Refusal):
        return [encode_example(group, made, worker, sample) for sample in range(group.group_size)]
    examples = [made] if isinstance(made, Example) else made
    return [encode_example(group, example, worker, sample) for sample, example in enumerate(examples)]


def encode_example(group: PromptGroup, example: Example | Refusal, worker: str, sample: int = 0) -> pb.TrajectoryEnvelope:
    """The envelope of an example, without logprobs, versions, and receipt. A refusal becomes
    INFRA_FAILED with its reason."""
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
        parts=1,
    )
    return pb.TrajectoryEnvelope(header=header, payload=payload, crc32c=crc32c.crc32c(payload))


def in_messages(envelopes: Iterable[pb.TrajectoryEnvelope], most_bytes: int) -> list[pb.TrajectoryBatch]:
    """Pack envelopes into messages of at most ``most_bytes``. The parts of a sample are in one
    message, into which they must fit."""
    batches: list[pb.TrajectoryBatch] = []
    held: list[pb.TrajectoryEnvelope] = []
    size = 0
    for parts in _samples(envelopes):
        cost = sum(len(e.payload) + len(e.payload_ref) + e.header.times.ByteSize() + 1024 for e in parts)
        if held and size + cost > most_bytes:
            batches.append(pb.TrajectoryBatch(trajectories=held))
            held, size = [], 0
        held.extend(parts)
        size += cost
    if held:
        batches.append(pb.TrajectoryBatch(trajectories=held))
    return batches


def _samples(envelopes: Iterable[pb.TrajectoryEnvelope]) -> list[list[pb.TrajectoryEnvelope]]:
    """The parts of each sample."""
    found: list[list[pb.TrajectoryEnvelope]] = []
    for envelope in envelopes:
        if envelope.header.key.part:
            found[-1].append(envelope)
        else:
            found.append([envelope])
    return found


def _by_token(values: Sequence[float], prompt: int, completion: int) -> bytes:
    """``values`` as float32[prompt + completion], with 0 for the prompt; empty if ``values`` is
    empty."""
    if not values:
        return b""
    found = np.zeros(prompt + completion, np.float32)
    found[prompt:] = values
    return found.tobytes()


def _key(group: PromptGroup, sample: int) -> pb.TrajectoryKey:
    return pb.TrajectoryKey(run_id=group.run_id, epoch=group.epoch, index=group.index, attempt=group.attempt, sample=sample)


def large(envelopes: Sequence[pb.TrajectoryEnvelope]) -> list[pb.TrajectoryEnvelope]:
    """The envelopes whose payload must be stored separately: it is large by itself, or the parts of
    its sample are together."""
    return [
        part
        for parts in _samples(envelopes)
        for part in parts
        if len(part.payload) > INLINE_BYTES or sum(len(each.payload) for each in parts) > 2 * INLINE_BYTES
    ]
