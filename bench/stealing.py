"""Compares work that workers pull with work that is assigned in advance, for 16 simulated workers
of which two are half as fast.

    make bench-stealing; or PYTHONPATH=python python bench/stealing.py [--workers 16] [--slow 2] [--groups 256] [--check]

Workers use the real code between the two streams (pulling, sharing, publishing) and a real NATS
server. Only the engine is simulated: the duration of a sample depends on its number of tokens
(lognormal, drawn from its seed) and the worker's speed. Both sides get the same groups, seeds, and
workers. In the static split each worker has its own queue with every n-th group; otherwise all pull
from one queue. The output is the time from the first pull to the last published sample, and the
ratio. With `--check` the exit code is 1 if the ratio is below 1.3.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from nats.aio.client import Client
from record import recorded

from rollout.environment import Observation, Result, Task, Turn
from rollout.run.v1.run_pb2 import PromptGroup
from rollout.weights.v1.weights_pb2 import WeightsReceipt
from rollout_testing.daemon import Daemon
from rollout_testing.run import RunStreams, prompt_group
from rollout_testing.services import BufferDouble, Host, buffer_double, services_of
from rollout_testing.sim.engine import SimText
from rollout_workers.engines.base import Engine, EngineStats, GroupRequest, SampleOutput, SamplingParams, VersionSpan
from rollout_workers.environments.episode import EpisodeRunner
from rollout_workers.inference.puller import Puller, capacity
from rollout_workers.inference.receipt import EngineReceipts
from rollout_workers.inference.sampler import Outlet, Sampler
from rollout_workers.inference.sharing import Sharing
from rollout_workers.inference.throughput import Throughput
from rollout_workers.worker.bus import connect
from rollout_workers.worker.credential import Token
from rollout_workers.worker.discovery import Services
from rollout_workers.worker.heartbeat import Heartbeat
from rollout_workers.worker.publisher import Publisher
from rollout_workers.worker.spec import Identity
from rollout_workers.worker.stream import WorkQueue

BAR = 1.3
SLOTS, SAMPLES = 16, 4
MEAN_SECONDS, SIGMA = 1.0, 0.6


class Paced:
    """An engine with this many slots. The duration of a sample depends only on its seed and the
    engine's speed."""

    def __init__(self, speed: float) -> None:
        self._speed, self._slots = speed, asyncio.Semaphore(SLOTS)

    async def generate(self, batch: Sequence[GroupRequest]) -> AsyncIterator[SampleOutput]:
        samples = [asyncio.create_task(self._sample(request, n)) for request in batch for n in range(len(request.seeds))]
        for sample in asyncio.as_completed(samples):
            yield await sample

    async def _sample(self, request: GroupRequest, sample: int) -> SampleOutput:
        draw = np.random.default_rng(request.seeds[sample]).lognormal(-(SIGMA**2) / 2, SIGMA)
        async with self._slots:
            await asyncio.sleep(min(4.0, float(draw)) * MEAN_SECONDS / self._speed)
        ids, logprobs = np.full(64, 65, np.int32), np.zeros(64, np.float32)
        return SampleOutput(request.request_id, sample, ids, logprobs, logprobs, (VersionSpan(0, 0, 64),), "stop", text="A" * 64)

    async def weights_digest(self) -> str:
        return "blake3-" + "0" * 64

    def stats(self) -> EngineStats:
        return EngineStats(SLOTS, 0, 0, False, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)


class Unscored:
    """An environment of one turn that gives every answer the reward 0."""

    async def reset(self, tasks: Sequence[Task]) -> Sequence[Observation]:
        return [Observation(np.full(8, 66, np.int32), "BBBBBBBB") for _ in tasks]

    async def step(self, turns: Sequence[Turn]) -> Sequence[Result]:
        return [Result(reward=0.0) for _ in turns]

    async def close(self, episodes: Sequence[tuple[str, int]]) -> None:
        pass


@dataclass
class Worker:
    """The parts of an inference worker between its two streams."""

    client: Client
    heartbeat: Heartbeat
    puller: Puller
    sampler: Sampler
    sharing: asyncio.Task[None]
    services: Services

    @classmethod
    async def start(cls, daemon: Daemon, who: Identity, speed: float) -> Worker:
        client = await connect(daemon.nats_url, Token(daemon.token), name=who.registration)
        heartbeat = Heartbeat(daemon.nats_url, Token(daemon.token), name=who.registration)
        heartbeat.start()
        engine = cast(Engine, Paced(speed))
        receipts = EngineReceipts(engine)
        receipts.current = WeightsReceipt(digest=await engine.weights_digest())
        services = services_of(daemon)
        puller = Puller(None, capacity=capacity(SLOTS, SAMPLES), slots=SLOTS, group_size=SAMPLES, prepare=lambda items: None)
        publisher = Publisher(client, who.trajectory_subject, who.trajectory_stream, who.process)
        outlet = Outlet(publisher, services, Throughput(engine.stats), puller)
        runner = EpisodeRunner(engine, cast(Any, Unscored()), SimText(), SamplingParams(max_tokens=64), puller.sampled)
        sampler = Sampler(who, runner, receipts, outlet, services, puller)
        queue = WorkQueue(client, heartbeat, who.work_stream, puller.deliver)
        await queue.start()
        puller.start(queue, sampler.begin)
        sharing = asyncio.create_task(Sharing(client, who.idle_subject, puller, queue, SAMPLES, lambda: receipts.version).run())
        return cls(client, heartbeat, puller, sampler, sharing, services)

    async def stop(self) -> None:
        self.sharing.cancel()
        await self.puller.stop()
        await self.sampler.drain()
        await self.client.close()
        await self.services.close()
        await asyncio.to_thread(self.heartbeat.stop)


async def run(daemon: Daemon, queues: dict[str, list[float]], groups: int, buffer: BufferDouble) -> tuple[float, int]:
    """The seconds that the workers of these queues (name -> speeds) need for the groups, which are
    assigned to the queues in turn, and the number of groups that moved between workers."""
    names = list(queues)
    streams = {name: await RunStreams.open(daemon, name) for name in names}
    work: dict[str, list[PromptGroup]] = {name: [] for name in names}
    for n in range(groups):
        name = names[n % len(names)]
        work[name].append(prompt_group(n, json.dumps({"prompt": str(n)}).encode(), group_size=SAMPLES, run=name))
    await asyncio.gather(*(streams[name].issue(work[name]) for name in names))
    asked = len(buffer.asked)
    began = time.monotonic()
    workers = await asyncio.gather(
        *(
            Worker.start(daemon, Identity(name, f"inference-{n}", "inference", 1), speed)
            for name, speeds in queues.items()
            for n, speed in enumerate(speeds)
        )
    )
    got = await asyncio.gather(*(streams[name].collect(len(work[name]) * SAMPLES, 600) for name in names))
    seconds = time.monotonic() - began
    keys = {(e.header.key.index, e.header.key.sample) for envelopes in got for e in envelopes}
    assert len(keys) == groups * SAMPLES == sum(map(len, got)), "a sample is missing or a duplicate"
    for worker in workers:
        await worker.stop()
    for each in streams.values():
        await each.close()
    return seconds, len(buffer.asked) - asked


async def measure(daemon: Daemon, workers: int, slow: int, groups: int) -> float:
    speeds = [0.5] * slow + [1.0] * (workers - slow)
    buffer = buffer_double()
    buffer.group_size = SAMPLES
    host = Host(daemon)
    host.buffer(buffer)
    await host.start()
    apart, _ = await run(daemon, {f"run-static-{n}": [speed] for n, speed in enumerate(speeds)}, groups, buffer)
    together, moved = await run(daemon, {"run-pull": speeds}, groups, buffer)
    await host.stop()
    print(f"{workers} workers of {SLOTS} slots, {slow} of them at half speed; {groups} groups of {SAMPLES} samples")
    print(f"static split: {apart:.1f} s, {groups * SAMPLES / apart:.0f} samples/s")
    print(f"pulled:       {together:.1f} s, {groups * SAMPLES / together:.0f} samples/s; {moved} groups moved to another worker")
    print(f"ratio {apart / together:.2f} (bar: {BAR})")
    return apart / together


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--slow", type=int, default=2)
    parser.add_argument("--groups", type=int, default=256)
    parser.add_argument("--check", action="store_true", help="exit with code 1 if the ratio is below the bar")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, recorded("stealing") as figures:
        daemon = Daemon(Path(folder)).start()
        try:
            ratio = asyncio.run(measure(daemon, given.workers, given.slow, given.groups))
        finally:
            daemon.stop()
        figures.update(ratio=ratio, bar=BAR, met=ratio >= BAR)
    return int(given.check and ratio < BAR)


if __name__ == "__main__":
    sys.exit(main())
