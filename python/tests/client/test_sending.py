"""How many puts are on their way at a time, against gRPC's own server."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any

import grpc
import numpy as np
import pytest

from rollout.buffer.v1 import buffer_pb2 as pb
from rollout.client.buffer import sending
from rollout.client.buffer.producer import Producer
from rollout.client.buffer.sample import Sample

IN_FLIGHT = 3


class Buffer(grpc.GenericRpcHandler):
    """Answers a request of a stream once it may."""

    def __init__(self) -> None:
        self.came: SimpleQueue[list[int]] = SimpleQueue()  # the numbers of the groups of each request
        self.may = threading.Semaphore(0)

    def service(self, handler_call_details: Any) -> Any:
        if not handler_call_details.method.endswith("/StreamTrajectories"):
            return None
        return grpc.stream_stream_rpc_method_handler(
            self.answer, pb.StreamTrajectoriesRequest.FromString, pb.StreamTrajectoriesResponse.SerializeToString
        )

    def answer(
        self, requests: Iterator[pb.StreamTrajectoriesRequest], _: grpc.ServicerContext
    ) -> Iterator[pb.StreamTrajectoriesResponse]:
        for request in requests:
            puts = request.put.puts
            self.came.put([put.trajectories[0].header.key.index for put in puts])
            self.may.acquire()
            results = [pb.PutResult(accepted=len(put.trajectories)) for put in puts]
            yield pb.StreamTrajectoriesResponse(answer=pb.PutTrajectoriesResponse(results=results))


@contextlib.contextmanager
def producing(buffer: Buffer, *, plain: bool) -> Iterator[Producer]:
    server = grpc.server(ThreadPoolExecutor(2), handlers=[buffer])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        with grpc.insecure_channel(address) as channel:
            yield Producer(channel, (), "r", in_flight=IN_FLIGHT, address=address if plain else "")
    finally:
        buffer.may.release(1000)
        server.stop(None).wait()


@pytest.mark.parametrize("plain", [True, False])
def test_as_many_puts_are_prepared_as_are_in_flight_and_no_more_are_sent(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "_WAIT_SECONDS", 60)  # so requests are full
    buffer, samples = Buffer(), [Sample(np.arange(8, dtype=np.int32))]
    puts, returned = 4 * IN_FLIGHT, SimpleQueue[int]()
    with producing(buffer, plain=plain) as producer:

        def put() -> None:
            for number in range(puts):
                producer.put(number, samples)
                returned.put(number)

        thread = threading.Thread(target=put, daemon=True)
        thread.start()
        prepared = 0
        for first in range(0, puts, IN_FLIGHT):
            assert buffer.came.get(timeout=30) == list(range(first, first + IN_FLIGHT))
            while prepared < min(first + 2 * IN_FLIGHT, puts):
                assert returned.get(timeout=30) == prepared
                prepared += 1
            for queue in (buffer.came, returned):
                with pytest.raises(Empty):
                    queue.get(timeout=0.1)
            buffer.may.release()
        thread.join(30)
        producer.close()
