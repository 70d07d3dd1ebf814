"""Requests made of bytes are the messages of the contract."""

from __future__ import annotations

import os
from typing import Any, cast

import crc32c
import grpc
import numpy as np
import pytest

from rollout.buffer.v1 import buffer_pb2 as pb
from rollout.client.buffer.producer import Producer
from rollout.client.buffer.sample import Sample
from rollout.client.buffer.segment import LentSegment
from rollout.client.buffer.segments import Segments
from rollout.client.buffer.sending import Sender
from rollout.trajectory.v1.trajectory_pb2 import (
    OUTCOME_COMPLETED,
    OUTCOME_TRUNCATED,
    Trajectory,
    TrajectoryBatch,
    TrajectoryHeader,
    TrajectoryKey,
    VersionSpan,
)
from rollout.weights.v1.weights_pb2 import WeightsReceipt

RECEIPT = WeightsReceipt(version=9, digest="blake3-x", cache_epoch=2)
ABOUTS = (
    Trajectory(outcome=OUTCOME_COMPLETED),
    Trajectory(outcome=OUTCOME_COMPLETED),  # as the one before
    Trajectory(outcome=OUTCOME_TRUNCATED, reward=-1.5, prompt_tokens=7),
    Trajectory(outcome=OUTCOME_TRUNCATED, reward=-1.5, prompt_tokens=7, reason="R", completion="a text of some length " * 9),
    Trajectory(outcome=OUTCOME_COMPLETED, version_spans=[VersionSpan(version=v, start=v, end=v + 1) for v in (8, 3, 9)]),
    Trajectory(outcome=OUTCOME_COMPLETED, key=TrajectoryKey(run_id="other", index=900, sample=200, part=3), token_ids=b"1234"),
)


class Nowhere:
    """A channel that nothing goes through."""

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: self


def parse(producer: Producer, number: int, samples: list[Sample], **options: Any) -> TrajectoryBatch:
    """What the buffer reads of one put."""
    producer.put(number, samples, epoch=2, attempt=1, receipt=RECEIPT, **options)
    request = pb.PutTrajectoriesRequest.FromString(b"".join(producer._sender._request([producer._sender._queue.get()])))
    assert request.run_id == "r" and len(request.puts) == 1 and not request.returned
    return request.puts[0]


@pytest.fixture
def producer(monkeypatch: pytest.MonkeyPatch) -> Producer:
    monkeypatch.setattr(Sender, "_send", lambda _: None)
    return Producer(cast(grpc.Channel, Nowhere()), (), "r", in_flight=100)


@pytest.mark.parametrize("tokens", [8, 127, 4000])
@pytest.mark.parametrize("lent", [False, True])
def test_a_put_is_what_protobuf_would_make_of_it(
    producer: Producer, tokens: int, lent: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    segment = None
    if lent:
        monkeypatch.setattr("rollout.client.buffer.producer._INLINE_BYTES", 0)
        path = tmp_path / "segment"
        path.write_bytes(b"RSEG0001")
        segment = LentSegment(300, 1 << 63, os.open(path, os.O_RDWR), 8, 1 << 40)
    monkeypatch.setattr(Segments, "_current", lambda _: segment)
    ids = np.arange(tokens, dtype=np.int32)
    mask = (ids % 2).astype(np.uint8)
    samples = [Sample(ids + n, -ids.astype(np.float32), mask, about=about) for n, about in enumerate(ABOUTS)]
    for number in (0, 70_000):
        got = parse(producer, number, samples, first=125, group_size=500)
        assert len(got.trajectories) == len(ABOUTS)
        for n, (envelope, about) in enumerate(zip(got.trajectories, ABOUTS, strict=True)):
            key = TrajectoryKey(run_id="r", epoch=2, index=number, attempt=1, sample=125 + n, part=3 * (n == 5))
            assert envelope.header == TrajectoryHeader(
                key=key,
                group_size=500,
                outcome=about.outcome,
                reason=about.reason,
                reward=about.reward,
                min_version=3 * (n == 4),
                max_version=9 * (n == 4),
                receipt=RECEIPT,
                tokens=tokens,
                completion_tokens=tokens - about.prompt_tokens,
            )
            payload = envelope.payload
            if lent:
                place = envelope.place
                assert not payload and (place.segment, place.lending) == (300, 1 << 63)
                payload = path.read_bytes()[place.offset : place.offset + place.length]
            else:
                assert not envelope.HasField("place")
            assert envelope.crc32c == crc32c.crc32c(payload)
            want = Trajectory()
            want.CopyFrom(about)
            want.key.CopyFrom(key)
            want.token_ids = samples[n].token_ids.tobytes()
            want.logprobs, want.loss_mask = samples[n].logprobs.tobytes(), samples[n].loss_mask.tobytes()
            assert Trajectory.FromString(payload) == want
