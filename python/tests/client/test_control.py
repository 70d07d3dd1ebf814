"""Pausing, resuming, and cancelling, against a gRPC server that records its calls."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from rollout.client import connect, connect_async
from rollout.run.v1 import run_pb2
from rollout.run.v1.run_pb2 import Run, RunState
from rollout.run.v1.run_pb2_grpc import SchedulerServiceServicer, add_SchedulerServiceServicer_to_server


class Scheduler(SchedulerServiceServicer):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def _run(self, call: str, state: str) -> Run:
        self.calls.append(call)
        return Run(run_id="run-1", state=RunState.Value(f"RUN_STATE_{state}"))

    def PauseRun(self, request, context):
        return run_pb2.PauseRunResponse(run=self._run(f"pause {request.run_id}", "PAUSED"))

    def ResumeRun(self, request, context):
        return run_pb2.ResumeRunResponse(run=self._run(f"resume {request.run_id}", "STARTING"))

    def CancelRun(self, request, context):
        return run_pb2.CancelRunResponse(run=self._run(f"cancel {request.run_id} drain={request.drain}", "CANCELLED"))


CALLS = ["pause sums", "resume sums", "cancel sums drain=True", "cancel sums drain=False"]
STATES = ["PAUSED", "STARTING", "CANCELLED", "CANCELLED"]


@pytest.fixture
def scheduler() -> Iterator[tuple[Scheduler, str]]:
    servicer = Scheduler()  # pyright: ignore[reportAbstractUsage]  # the other methods are not called
    server = grpc.server(ThreadPoolExecutor(1))
    add_SchedulerServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None).wait()


def states(runs: list[Run]) -> list[str]:
    return [RunState.Name(run.state).removeprefix("RUN_STATE_") for run in runs]


def test_a_run_is_paused_resumed_and_cancelled(scheduler: tuple[Scheduler, str]) -> None:
    servicer, address = scheduler
    with connect(address) as client:
        runs = [client.pause("sums"), client.resume("sums"), client.cancel("sums"), client.cancel("sums", drain=False)]
    assert servicer.calls == CALLS
    assert states(runs) == STATES


async def test_a_run_is_controlled_with_asyncio(scheduler: tuple[Scheduler, str]) -> None:
    servicer, address = scheduler
    async with connect_async(address) as client:
        runs = [await client.pause("sums"), await client.resume("sums"), await client.cancel("sums")]
        runs.append(await client.cancel("sums", drain=False))
    assert servicer.calls == CALLS
    assert states(runs) == STATES
