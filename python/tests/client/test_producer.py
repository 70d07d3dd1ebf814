"""What a producer sends, and how much at a time, against gRPC's own server."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any

import crc32c
import grpc
import numpy as np
import pytest

from rollout.buffer.v1 import buffer_pb2 as pb
from rollout.buffer.v1.buffer_pb2_grpc import BufferServiceStub
from rollout.client.buffer.producer import Producer
from rollout.client.buffer.sample import Sample
from rollout.trajectory.v1.trajectory_pb2 import (
    OUTCOME_COMPLETED,
    OUTCOME_TRUNCATED,
    Trajectory,
    TrajectoryHeader,
    TrajectoryKey,
    VersionSpan,
)
from rollout.weights.v1.weights_pb2 import WeightsReceipt

IN_FLIGHT = 3
RECEIPT = WeightsReceipt(version=9, digest="blake3-x", cache_epoch=2)
ABOUTS = (
    Trajectory(outcome=OUTCOME_COMPLETED),
    Trajectory(outcome=OUTCOME_TRUNCATED, reward=-1.5, prompt_tokens=7),
    Trajectory(outcome=OUTCOME_TRUNCATED, reward=-1.5, prompt_tokens=7, reason="R", completion="a text of some length " * 9),
    Trajectory(outcome=OUTCOME_COMPLETED, version_spans=[VersionSpan(version=v, start=v, end=v + 1) for v in (8, 3, 9)]),
    Trajectory(outcome=OUTCOME_COMPLETED, key=TrajectoryKey(run_id="other", index=900, sample=200, part=3), token_ids=b"1234"),
)


class Buffer(grpc.GenericRpcHandler):
    """Answers puts only after the test allows it."""

    def __init__(self) -> None:
        self.received: SimpleQueue[pb.PutTrajectoriesRequest] = SimpleQueue()
        self.allowed = threading.Semaphore(0)

    def service(self, handler_call_details: Any) -> Any:
        if not handler_call_details.method.endswith("/PutTrajectories"):
            return None
        return grpc.unary_unary_rpc_method_handler(
            self.answer, pb.PutTrajectoriesRequest.FromString, pb.PutTrajectoriesResponse.SerializeToString
        )

    def answer(self, request: pb.PutTrajectoriesRequest, _: grpc.ServicerContext) -> pb.PutTrajectoriesResponse:
        self.received.put(request)
        self.allowed.acquire()
        return pb.PutTrajectoriesResponse(results=[pb.PutResult(accepted=len(put.trajectories)) for put in request.puts])


@contextlib.contextmanager
def producing(buffer: Buffer) -> Iterator[Producer]:
    server = grpc.server(ThreadPoolExecutor(2), handlers=[buffer])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        with grpc.insecure_channel(address) as channel:
            yield Producer(BufferServiceStub(channel), (), "r", in_flight=IN_FLIGHT)
    finally:
        buffer.allowed.release(1000)
        server.stop(None).wait()


def test_the_number_of_unanswered_puts_is_bounded() -> None:
    buffer, samples = Buffer(), [Sample(np.arange(8, dtype=np.int32))]
    puts, returned = 1 + 4 * IN_FLIGHT, SimpleQueue[int]()
    with producing(buffer) as producer:

        def put() -> None:
            for number in range(puts):
                producer.put(number, samples)
                returned.put(number)

        thread = threading.Thread(target=put, daemon=True)
        thread.start()
        sent = prepared = 0
        while sent < puts:
            request = buffer.received.get(timeout=30)
            got = [batch.trajectories[0].header.key.index for batch in request.puts]
            assert got == list(range(sent, sent + len(got))) and 0 < len(got) <= IN_FLIGHT
            unanswered = sent + 2 * IN_FLIGHT
            sent += len(got)
            while prepared < min(unanswered, puts):
                assert returned.get(timeout=30) == prepared
                prepared += 1
            for queue in (buffer.received, returned):
                with pytest.raises(Empty):
                    queue.get(timeout=0.1)
            buffer.allowed.release()
        thread.join(30)
        producer.close()


@pytest.mark.parametrize("tokens", [8, 127, 4000])
def test_a_put_carries_headers_payloads_and_checksums(tokens: int) -> None:
    buffer = Buffer()
    buffer.allowed.release(1000)
    ids = np.arange(tokens, dtype=np.int32)
    mask = (ids % 2).astype(np.uint8)
    samples = [Sample(ids + n, -ids.astype(np.float32), mask, about=about) for n, about in enumerate(ABOUTS)]
    with producing(buffer) as producer:
        for number in (0, 70_000):
            producer.put(number, samples, epoch=2, attempt=1, receipt=RECEIPT, first=125, group_size=500).result(30)
            request = buffer.received.get(timeout=30)
            assert request.run_id == "r" and len(request.puts) == 1
            got = request.puts[0].trajectories
            assert len(got) == len(ABOUTS)
            for n, (envelope, about) in enumerate(zip(got, ABOUTS, strict=True)):
                key = TrajectoryKey(run_id="r", epoch=2, index=number, attempt=1, sample=125 + n, part=3 * (n == 4))
                assert envelope.header == TrajectoryHeader(
                    key=key,
                    group_size=500,
                    outcome=about.outcome,
                    reason=about.reason,
                    reward=about.reward,
                    min_version=3 * (n == 3),
                    max_version=9 * (n == 3),
                    receipt=RECEIPT,
                    tokens=tokens,
                    completion_tokens=tokens - about.prompt_tokens,
                )
                assert envelope.crc32c == crc32c.crc32c(envelope.payload)
                want = Trajectory()
                want.CopyFrom(about)
                want.key.CopyFrom(key)
                want.token_ids = samples[n].token_ids.tobytes()
                want.logprobs, want.loss_mask = samples[n].logprobs.tobytes(), samples[n].loss_mask.tobytes()
                assert Trajectory.FromString(envelope.payload) == want
        producer.close()
