"""Reads the payloads of a batch from the buffer's segment files, or through the buffer service if
it is on another host."""

from __future__ import annotations

import asyncio
import logging
import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import crc32c
import grpc
import numpy as np

from rollout import names
from rollout.buffer.v1.buffer_pb2 import Batch, ReadPayloadsRequest, SampleRef
from rollout.buffer.v1.buffer_pb2_grpc import BufferServiceStub
from rollout.errors import RolloutError
from rollout.trajectory.v1.trajectory_pb2 import OUTCOME_INFRA_FAILED, OUTCOME_TRUNCATED, Trajectory, TrajectoryKey
from rollout_workers.trainer.types import TrainSample
from rollout_workers.worker.discovery import Services, ServiceUnavailable, attempts

log = logging.getLogger(__name__)

PARTS = 1 << 12  # spacing of sample numbers, so that the parts of a sample follow each other
RETRY_SECONDS = 30.0
"""How long to retry an unavailable buffer before the step fails. The controller then retries the
step."""


class PayloadCorrupt(RolloutError):
    """The checksum of a payload differs from the recorded one, or its arrays differ in length."""

    reason: ClassVar[str] = "PAYLOAD_CORRUPT"


async def read_batch(batch: Batch, services: Services) -> list[TrainSample]:
    """The samples of a batch in its order. Raises :class:`PayloadCorrupt`,
    :class:`ServiceUnavailable`, and other gRPC errors."""
    try:
        return await asyncio.to_thread(read_segments, batch)
    except (OSError, ValueError, PayloadCorrupt) as error:
        log.info("step %d: cannot read the segments here (%s); reading through the buffer", batch.step, error)
    payloads = await _through_buffer(batch, services)
    if len(payloads) != len(batch.samples):
        raise PayloadCorrupt(f"step {batch.step}: the buffer sent {len(payloads)} payloads for {len(batch.samples)} samples")
    return _samples(batch.samples, payloads)


async def _through_buffer(batch: Batch, services: Services) -> list[bytes]:
    """The payloads from the buffer service, with retries while another process takes the service
    over."""
    loop = asyncio.get_running_loop()
    until = loop.time() + RETRY_SECONDS
    request = ReadPayloadsRequest(run_id=batch.run_id, step=batch.step)
    async for _ in attempts(f"step {batch.step}: the buffer does not send the payloads"):
        try:
            stub = await services.stub(names.BUFFER_SERVICE, BufferServiceStub)
            chunks = stub.ReadPayloads(request, metadata=services.metadata())
            return [payload async for chunk in chunks for payload in chunk.payloads]
        except ServiceUnavailable:
            if loop.time() > until:
                raise
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            services.forget(names.BUFFER_SERVICE)
            if loop.time() > until:
                raise ServiceUnavailable(f"the buffer does not answer: {error.details()}") from error
    raise AssertionError("unreachable")


def read_segments(batch: Batch) -> list[TrainSample]:
    """The samples from files only. Raises ``OSError`` if one cannot be opened, ``ValueError`` if a
    payload is not in a file, and :class:`PayloadCorrupt`."""
    refs = [*batch.samples]
    places = [(ref.segment, ref.offset, ref.length) for ref in refs]
    paths = {path for path, _, _ in places}
    if "" in paths:
        raise ValueError("a payload is in the storage service")
    with _mapped(sorted(paths)) as segments:
        return _samples(refs, [segments[path][start : start + length] for path, start, length in places])


@contextmanager
def _mapped(paths: Sequence[str]) -> Iterator[dict[str, mmap.mmap]]:
    maps: dict[str, mmap.mmap] = {}
    try:
        for path in paths:
            with open(path, "rb") as file:
                maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        yield maps
    finally:
        for mapped in maps.values():
            mapped.close()


def _samples(refs: Sequence[SampleRef], payloads: Sequence[bytes]) -> list[TrainSample]:
    """The samples of payloads whose checksums match, without those that are left out of their
    group."""
    for ref, payload in zip(refs, payloads, strict=True):
        if crc32c.crc32c(payload) != ref.crc32c:
            raise PayloadCorrupt(f"the payload of {_name(ref.key)} does not match its recorded checksum")
    trajectories = map(Trajectory.FromString, payloads)
    return [_sample(trajectory) for trajectory in trajectories if trajectory.outcome != OUTCOME_INFRA_FAILED]


def parsed(payload: bytes) -> TrainSample:
    """The sample of a serialized ``Trajectory``. Its arrays are views of the parsed bytes. Raises
    :class:`PayloadCorrupt`."""
    return _sample(Trajectory.FromString(payload))


def _sample(trajectory: Trajectory) -> TrainSample:
    ids = np.frombuffer(trajectory.token_ids, "<i4")
    logprobs = np.frombuffer(trajectory.logprobs, "<f4")
    mask = np.frombuffer(trajectory.loss_mask, np.uint8)
    rewards = np.frombuffer(trajectory.token_rewards, "<f4") if trajectory.token_rewards else None
    teacher = np.frombuffer(trajectory.teacher_logprobs, "<f4") if trajectory.teacher_logprobs else None
    fits = len(ids) == len(logprobs) == len(mask) >= trajectory.prompt_tokens
    if not fits or any(values is not None and len(values) != len(ids) for values in (rewards, teacher)):
        raise PayloadCorrupt(
            f"the arrays of {_name(trajectory.key)} differ in length: {len(ids)} tokens, {len(logprobs)} logprobs, "
            f"{len(mask)} mask values, {len(ids) if rewards is None else len(rewards)} token rewards, "
            f"{len(ids) if teacher is None else len(teacher)} logprobs of a teacher, "
            f"prompt of {trajectory.prompt_tokens}"
        )
    key, spans = trajectory.key, trajectory.version_spans
    return TrainSample(
        group_key=_group(key.epoch, key.index),
        sample=key.sample * PARTS + key.part,
        token_ids=ids,
        prompt_length=trajectory.prompt_tokens,
        loss_mask=mask,
        logprobs=logprobs,
        reward=trajectory.reward,
        version=spans[0].version if len(spans) == 1 else min((span.version for span in spans), default=0),
        truncated=trajectory.outcome == OUTCOME_TRUNCATED,
        prompt=trajectory.prompt,
        completion=trajectory.completion,
        token_rewards=rewards,
        teacher_logprobs=teacher,
        metrics=dict(trajectory.metrics),
        part=key.part,
        turns=tuple(trajectory.turns),  # ranks get samples pickled
        spans=tuple(spans),
        parent=trajectory.parent if trajectory.HasField("parent") else None,
        tensors=_tensors(trajectory),
    )


def _tensors(trajectory: Trajectory) -> Mapping[str, Any]:
    if not trajectory.tensors:
        return {}
    from rollout_workers.multistep.encode import tensors_of  # which imports torch
    from rollout_workers.multistep.errors import BatchInvalid

    try:
        return tensors_of(trajectory)
    except BatchInvalid as error:
        raise PayloadCorrupt(f"the payload of {_name(trajectory.key)}: {error}") from error


def _group(epoch: int, index: int) -> str:
    return f"{epoch:010d}/{index:020d}"  # sorts by position


def _name(key: TrajectoryKey) -> str:
    return f"{key.run_id}/{key.epoch}/{key.index}/{key.attempt}/{key.sample}"
