"""Payloads are read from segment files or through the buffer, verified, and returned in the batch's
order."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from rollout.buffer.v1.buffer_pb2 import ReadPayloadsResponse
from rollout.trajectory.v1.trajectory_pb2 import OUTCOME_INFRA_FAILED, OUTCOME_TRUNCATED, Trajectory, VersionSpan
from rollout_testing.daemon import Daemon
from rollout_testing.services import BufferDouble, Host, buffer_double, services_of
from rollout_workers.learner import payload
from rollout_workers.learner.payload import PayloadCorrupt, parsed, read_batch
from rollout_workers.trainer import TrainSample
from rollout_workers.trainer.metrics import describe_batch
from rollout_workers.worker.credential import Token
from rollout_workers.worker.discovery import Services, ServiceUnavailable

from .batches import batch, trajectories, trajectory


@pytest.fixture
def nowhere() -> Services:
    """Service discovery without services, so that payloads can only come from files."""
    return Services("127.0.0.1:1", Token("token"))


def same(one: TrainSample, other: TrainSample) -> bool:
    return one.group_key == other.group_key and one.sample == other.sample and np.array_equal(one.token_ids, other.token_ids)


async def test_reads_payloads_from_segments(nowhere: Services, run: str, tmp_path: Path) -> None:
    payloads = trajectories(run, 3, version=2)
    samples = await read_batch(batch(run, 3, payloads, tmp_path), nowhere)
    assert len(samples) == 32
    assert [sample.group_key for sample in samples[::4]] == [f"0000000000/{i:020d}" for i in range(16, 24)]
    first = samples[0]
    assert first.token_ids.dtype == np.int32 and first.logprobs.dtype == np.float32
    assert first.loss_mask.tolist() == [0] * first.prompt_length + [1] * (len(first.token_ids) - first.prompt_length)
    assert (first.reward, first.version) == (1.0, 2)
    sent = pickle.loads(pickle.dumps(first))  # as to another rank of the learner
    assert same(sent, first) and (sent.turns, sent.spans) == (first.turns, first.spans)
    assert sorted(samples, key=lambda s: (s.group_key, s.sample)) == samples


async def test_the_version_of_a_sample_is_its_oldest(nowhere: Services, run: str, tmp_path: Path) -> None:
    """If weights change within a sample, its oldest version counts, in any order of spans."""
    payloads = trajectories(run, 9, groups=1, version=8)
    for number, spans in ((1, ((5, 0, 1), (8, 1, 2))), (2, ((8, 1, 2), (7, 0, 1)))):
        changed = Trajectory.FromString(payloads[number])
        changed.ClearField("version_spans")
        changed.version_spans.extend(VersionSpan(version=v, start=start, end=end) for v, start, end in spans)
        payloads[number] = changed.SerializeToString(deterministic=True)
    samples = await read_batch(batch(run, 9, payloads, tmp_path), nowhere)
    assert [sample.version for sample in samples] == [8, 5, 7, 8]
    metrics = describe_batch(samples, step=9, sampled=True)
    shares = {name: value for name, value in metrics.items() if name.startswith("staleness/") and value}
    assert shares == {"staleness/max": 3, "staleness/share_0": 0.5, "staleness/share_1": 0.25, "staleness/share_3": 0.25}


async def test_a_sample_that_is_left_out_of_its_group_is_not_trained_on(nowhere: Services, run: str, tmp_path: Path) -> None:
    """Its payload is checked and has no tokens."""
    payloads = trajectories(run, 1, groups=2)
    failed = Trajectory(key=Trajectory.FromString(payloads[1]).key, outcome=OUTCOME_INFRA_FAILED, reason="ENVIRONMENT_TIMEOUT")
    payloads[1] = failed.SerializeToString(deterministic=True)
    samples = await read_batch(batch(run, 1, payloads, tmp_path), nowhere)
    assert [sample.sample // payload.PARTS for sample in samples] == [0, 2, 3, 0, 1, 2, 3]


async def test_reads_are_retried_while_another_process_takes_the_buffer_over(
    daemon: Daemon, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    payloads, asked = trajectories(run, 1), list[int]()

    class Restarting(BufferDouble):
        async def ReadPayloads(self, request: Any, context: Any) -> AsyncIterator[ReadPayloadsResponse]:
            asked.append(request.step)
            yield ReadPayloadsResponse(payloads=payloads[:3])
            if len(asked) < 3:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the process ends")
            yield ReadPayloadsResponse(payloads=payloads[3:])

    host = Host(daemon)
    host.buffer(Restarting())  # pyright: ignore[reportAbstractUsage]
    await host.start()
    services = services_of(daemon)
    assert len(await read_batch(batch(run, 1, payloads, None), services)) == 32 and len(asked) == 3
    asked.clear()
    monkeypatch.setattr(payload, "RETRY_SECONDS", -1.0)
    with pytest.raises(ServiceUnavailable, match="the buffer does not answer: the process ends"):
        await read_batch(batch(run, 1, payloads, None), services)
    await services.close()
    await host.stop()


async def test_reads_through_the_buffer_if_the_segments_are_on_another_host(daemon: Daemon, run: str, tmp_path: Path) -> None:
    payloads = trajectories(run, 1)
    host, double = Host(daemon), buffer_double()
    double.payloads = {1: payloads}
    host.buffer(double)
    await host.start()
    services = services_of(daemon)
    far = await read_batch(batch(run, 1, payloads, None), services)
    near = await read_batch(batch(run, 1, payloads, tmp_path), services)
    assert all(same(one, other) for one, other in zip(far, near, strict=True))
    referenced = batch(run, 1, payloads, tmp_path)
    referenced.samples[3].ClearField("segment")
    referenced.samples[3].payload_ref = "blake3-" + "0" * 64
    assert len(await read_batch(referenced, services)) == 32
    double.payloads = {1: payloads[:-1]}
    with pytest.raises(PayloadCorrupt, match="31 payloads for 32 samples"):
        await read_batch(batch(run, 1, payloads, None), services)
    await services.close()
    await host.stop()


async def test_a_damaged_segment_is_read_through_the_buffer(daemon: Daemon, run: str, tmp_path: Path) -> None:
    payloads = trajectories(run, 1)
    made = batch(run, 1, payloads, tmp_path)
    path = Path(made.samples[0].segment)
    whole = bytearray(path.read_bytes())
    whole[made.samples[5].offset + 40] ^= 1
    path.write_bytes(whole)
    host, double = Host(daemon), buffer_double()
    double.payloads = {1: payloads}
    host.buffer(double)
    await host.start()
    services = services_of(daemon)
    assert len(await read_batch(made, services)) == 32
    double.payloads = {1: [payloads[1], *payloads[1:]]}
    with pytest.raises(PayloadCorrupt, match="recorded checksum"):
        await read_batch(made, services)
    await services.close()
    await host.stop()


async def test_only_samples_at_the_token_limit_are_truncated(nowhere: Services, run: str, tmp_path: Path) -> None:
    cut = Trajectory.FromString(trajectory(run, 1, 1, "1+2=", "3", 1.0, 2))
    cut.outcome = OUTCOME_TRUNCATED
    payloads = [trajectory(run, 1, 0, "1+2=", "3", 1.0, 2), cut.SerializeToString(), trajectory(run, 1, 2, "1+2=", "3", 1.0, 2)]
    samples = await read_batch(batch(run, 1, payloads, tmp_path), nowhere)
    assert [sample.truncated for sample in samples] == [False, True, False]


@pytest.mark.parametrize(
    "change",
    [
        Trajectory(token_ids=b"\0" * 8),
        Trajectory(logprobs=b"\0" * 8),
        Trajectory(loss_mask=b"\0" * 4),
        Trajectory(prompt_tokens=4),
        Trajectory(token_rewards=b"\0" * 8),
        Trajectory(teacher_logprobs=b"\0" * 16),
    ],
)
def test_arrays_of_different_lengths_are_rejected(change: Trajectory) -> None:
    payload = Trajectory(
        token_ids=b"\0" * 12, logprobs=b"\0" * 12, loss_mask=b"\0" * 3, prompt_tokens=3, teacher_logprobs=b"\0" * 12
    )
    assert parsed(payload.SerializeToString()).token_rewards is None
    payload.MergeFrom(change)
    with pytest.raises(PayloadCorrupt, match=r"prompt of [34]"):
        parsed(payload.SerializeToString())
