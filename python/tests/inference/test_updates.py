"""Weights are staged while the old version serves, and committed as the caller says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from rollout.inference.v1 import inference_pb2 as pb
from rollout.weights.v1.weights_pb2 import WeightsManifest, WeightsReceipt
from rollout_testing.daemon import Daemon
from rollout_testing.run import Example, RunStreams, prompt_group
from rollout_testing.waiting import until

from .test_server import reason_of
from .test_weights import Loader, version


class Updated(Loader):
    """A worker and a client that updates its weights in two phases."""

    async def stage(self, manifest: WeightsManifest) -> None:
        await self._stub.StageWeights(pb.StageWeightsRequest(weights=manifest), metadata=self.made.metadata)

    async def commit(self, manifest: WeightsManifest, *, drain: bool = False) -> WeightsReceipt:
        request = pb.CommitWeightsRequest(run_id=manifest.run_id, version=manifest.version, digest=manifest.digest, drain=drain)
        return (await self._stub.CommitWeights(request, metadata=self.made.metadata)).receipt

    async def pause(self, seconds: int = 0) -> None:
        await self._stub.PauseEngine(pb.PauseEngineRequest(max_seconds=seconds), metadata=self.made.metadata)

    async def resume(self) -> None:
        await self._stub.ResumeEngine(pb.ResumeEngineRequest(), metadata=self.made.metadata)

    def generate(self, name: str, pinned: int | None = None) -> AsyncIterator[pb.GenerateResponse]:
        """Sixteen tokens of one completion, piece by piece. pinned: the version to sample with."""
        params = pb.SamplingParams(max_tokens=16, ignore_eos=True, seed=1)
        prompt = pb.Prompt(text="1+1=")
        request = pb.GenerateRequest(request_id=name, prompts=[prompt], params=params, n=1, stream=True, weights_version=pinned)
        return self._stub.Generate(request, metadata=self.made.metadata)


async def versions(pieces: AsyncIterator[pb.GenerateResponse]) -> list[int]:
    """The versions that sampled the rest of a completion."""
    last: Any = None
    async for piece in pieces:
        last = piece
    return [span.version for span in last.version_spans]


async def test_staged_weights_serve_after_the_commit(daemon: Daemon, example: Example, run: str, tmp_path: Path) -> None:
    worker = await Updated(daemon, example, run).start()
    before = await worker.status()
    first, second = version(example, tmp_path, 1, run), version(example, tmp_path, 2, run)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.commit(first)
    assert reason_of(caught.value) == (grpc.StatusCode.FAILED_PRECONDITION, "WEIGHTS_NOT_STAGED")
    await worker.stage(first)
    await worker.stage(first)
    staged = await worker.status()
    assert (staged.receipt, staged.staged_version) == (before.receipt, 1)
    await worker.stage(second)  # replaces the first
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.commit(first)
    assert reason_of(caught.value)[1] == "WEIGHTS_NOT_STAGED"
    receipt = await worker.commit(second)
    assert (receipt.version, receipt.digest) == (2, second.digest)
    assert await worker.commit(second) == receipt
    assert not (await worker.status()).HasField("staged_version")
    assert await worker.made.stop() == 0


async def test_weights_that_fail_to_stage_leave_the_staged_and_the_old_ones_alone(
    daemon: Daemon, example: Example, run: str, tmp_path: Path
) -> None:
    worker = await Updated(daemon, example, run).start()
    first = version(example, tmp_path, 1, run)
    lying = WeightsManifest(run_id=run, version=2, digest="blake3-" + "0" * 64, directory=first.directory)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.stage(lying)
    assert reason_of(caught.value) == (grpc.StatusCode.FAILED_PRECONDITION, "WEIGHTS_DIGEST_MISMATCH")
    status = await worker.status()
    assert status.receipt.version == 0 and not status.HasField("staged_version")
    await worker.stage(first)
    assert (await worker.commit(first)).version == 1
    assert await worker.made.stop() == 0


async def test_a_commit_in_flight_continues_requests_with_the_new_weights(
    daemon: Daemon, example: Example, run: str, tmp_path: Path
) -> None:
    worker = await Updated(daemon, example, run).start()
    first = version(example, tmp_path, 1, run)
    await worker.stage(first)
    pieces = worker.generate("a")
    await anext(aiter(pieces))
    await worker.pause()
    await worker.commit(first)
    await worker.resume()
    assert await versions(pieces) in ([0, 1], [0]), "the request may have ended before the pause"
    assert await worker.made.stop() == 0


async def test_a_commit_that_drains_waits_for_requests_and_holds_new_ones_back(
    daemon: Daemon, example: Example, run: str, tmp_path: Path
) -> None:
    worker = await Updated(daemon, example, run, weights={"update": "rolling"}).start()
    first = version(example, tmp_path, 1, run)
    await worker.stage(first)
    await worker.pause()
    running = asyncio.create_task(versions(worker.generate("a")))
    await until(lambda: _samples(worker, 1))
    committing = asyncio.create_task(worker.commit(first, drain=True))
    await until(lambda: _drains(worker))
    waiting = asyncio.create_task(versions(worker.generate("b")))
    pinned = asyncio.create_task(versions(worker.generate("c", pinned=0)))
    done, _ = await asyncio.wait({running, committing, waiting, pinned}, timeout=0.2)
    assert not done and await _samples(worker, 1), "the commit waits for one request, and the other waits for the commit"
    await worker.resume()
    assert await asyncio.gather(running, waiting) == [[0], [1]]
    assert (await committing).version == 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pinned
    assert reason_of(caught.value) == (grpc.StatusCode.FAILED_PRECONDITION, "WEIGHTS_NOT_FOUND")
    assert await worker.made.stop() == 0


async def test_a_paused_engine_resumes_by_itself_if_its_caller_is_gone(daemon: Daemon, example: Example, run: str) -> None:
    worker = await Updated(daemon, example, run).start()
    await worker.pause(1)
    assert (await worker.status()).activity.startswith("paused")
    async with asyncio.timeout(60):
        assert await versions(worker.generate("a")) == [0]
    assert await worker.made.stop() == 0


async def test_a_worker_of_an_atomic_run_samples_nothing_before_it_is_resumed(
    daemon: Daemon, example: Example, run: str, tmp_path: Path, streams: RunStreams
) -> None:
    worker = await Updated(daemon, example, run, weights={"update": "atomic"}).start()
    assert (await worker.status()).activity.startswith("paused")
    await streams.issue([prompt_group(0, example.rows(1)[0], run=run)])
    first = version(example, tmp_path, 1, run)
    await worker.stage(first)
    await worker.commit(first)
    await worker.resume()
    assert {envelope.header.receipt.version for envelope in await streams.collect(4)} == {1}
    assert await worker.made.stop() == 0


async def test_a_reserved_worker_takes_no_work_and_serves_its_version(
    daemon: Daemon, example: Example, run: str, tmp_path: Path, streams: RunStreams
) -> None:
    worker = Updated(daemon, example, run, weights={"update": "atomic"})
    worker.spec.reserved = True
    worker = await worker.start()
    await streams.issue([prompt_group(0, example.rows(1)[0], run=run)])
    first = version(example, tmp_path, 1, run)
    await worker.stage(first)
    await worker.commit(first, drain=True)
    assert await versions(worker.generate("a")) == [1]
    status = await worker.status()
    assert status.reserved and status.activity == "reserved for evaluations, at weights version 1 (eval.workers)"
    assert await streams.work_left() == 1, "the group waits for a worker that samples"
    assert await worker.made.stop() == 0


async def _samples(worker: Loader, samples: int) -> bool:
    status = await worker.status()
    return status.active + status.queued == samples


async def _drains(worker: Loader) -> bool:
    status = await worker.status()
    return status.paused and "before it loads weights version 1" in status.activity
