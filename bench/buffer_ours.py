"""One round of the path that rollout's workers use, for bench/buffer.py: a producer and a consumer,
one process each.

python bench/buffer_ours.py SHAPE SHARE DURABILITY FOLDER

The producer encodes groups as an inference worker does and publishes them with the worker's
Publisher to JetStream. The buffer of a rolloutd ingests them. The consumer leases batches, reads
them with the learner's reader, checks every byte, and commits and trims each step.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import crc32c
from buffer_load import IN_FLIGHT, Load, Shape, finish, shape_of

from rollout.buffer.v1 import buffer_pb2 as pb
from rollout.buffer.v1.buffer_pb2_grpc import BufferServiceStub
from rollout.trajectory.v1.trajectory_pb2 import (
    OUTCOME_COMPLETED,
    Trajectory,
    TrajectoryEnvelope,
    TrajectoryHeader,
    TrajectoryKey,
)
from rollout_testing.credential import services_key
from rollout_testing.daemon import Daemon
from rollout_testing.run import RunStreams
from rollout_testing.services import services_of
from rollout_workers.inference.artifact import move_out
from rollout_workers.inference.encode import in_messages, large
from rollout_workers.learner.payload import read_batch
from rollout_workers.worker.bus import connect
from rollout_workers.worker.credential import Token
from rollout_workers.worker.discovery import Services
from rollout_workers.worker.publisher import Publisher

RUN = "bench"


def main() -> None:
    shape = shape_of(sys.argv[1], float(sys.argv[2]))
    folder = Path(tempfile.mkdtemp(dir=sys.argv[4], prefix="bench-buffer-"))
    options = ["--buffer-durability", sys.argv[3]]
    daemon = Daemon(folder, targets="nats,registry,storage,buffer", options=options).start()
    try:
        asyncio.run(produce(daemon, shape))
    finally:
        daemon.stop()
        shutil.rmtree(folder)


async def produce(daemon: Daemon, shape: Shape) -> None:
    streams = await RunStreams.open(daemon, RUN)
    services = services_of(daemon)
    buffer: Any = await services.stub("buffer", BufferServiceStub)
    config = pb.LedgerConfig(
        group_size=shape.size, groups_per_step=shape.batch, rows=shape.groups, order=pb.LEASE_ORDER_COMPLETION
    )
    await buffer.OpenLedger(pb.OpenLedgerRequest(run_id=RUN, config=config), metadata=services.metadata())
    here, there = multiprocessing.get_context("spawn").Pipe()
    consumer = multiprocessing.get_context("spawn").Process(target=consume, args=(daemon.consul, daemon.token, shape, there))
    consumer.start()
    client = await connect(daemon.nats_url, Token(daemon.token), name="bench")
    publisher = Publisher(client, f"rollout.traj.{RUN}", f"TRAJ_{RUN}", "bench")
    load = Load(shape)
    await asyncio.to_thread(here.recv)
    print("begin", flush=True)

    async def put(group: list[TrajectoryEnvelope]) -> None:
        for envelope in large(group):
            await move_out(envelope, services)
        for batch in in_messages(group, publisher.most_bytes):
            await publisher.publish(batch.SerializeToString(), {})

    await bounded(shape.groups, lambda number: put(encode(load, number)))
    finish(await asyncio.to_thread(here.recv))
    consumer.join()
    await client.close()
    await streams.close()


async def bounded(count: int, put: Callable[[int], Awaitable[None]]) -> None:
    """Run ``put`` for each number with at most IN_FLIGHT at a time."""
    room = asyncio.Semaphore(IN_FLIGHT)

    async def one(started: Awaitable[None]) -> None:
        try:
            await started
        finally:
            room.release()

    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            await room.acquire()
            tasks.create_task(one(put(number)))


def encode(load: Load, group: int) -> list[TrajectoryEnvelope]:
    load.stamp(group)
    key = TrajectoryKey(run_id=RUN, index=group)
    envelopes = []
    for sample in range(load.shape.size):
        key.sample = sample
        payload = Trajectory(
            key=key,
            token_ids=load.ids[sample].tobytes(),
            logprobs=load.logprobs[sample].tobytes(),
            loss_mask=load.mask[sample].tobytes(),
            outcome=OUTCOME_COMPLETED,
        ).SerializeToString(deterministic=True)
        header = TrajectoryHeader(
            key=key, group_size=load.shape.size, outcome=OUTCOME_COMPLETED, tokens=load.shape.tokens, worker_id="bench"
        )
        envelopes.append(TrajectoryEnvelope(header=header, payload=payload, crc32c=crc32c.crc32c(payload)))
    return envelopes


def consume(consul: str, token: str, shape: Shape, results: Connection) -> None:
    asyncio.run(train(consul, token, shape, results))


async def train(consul: str, token: str, shape: Shape, results: Connection) -> None:
    load = Load(shape)
    services = Services(consul, Token(token), services_key=services_key(token), consul_token=Token(token))
    buffer: Any = await services.stub("buffer", BufferServiceStub)
    results.send("ready")
    for step in range(1, shape.groups // shape.batch + 1):
        answer = None
        while answer is None or not answer.HasField("batch"):
            request = pb.LeaseBatchRequest(run_id=RUN, step=step, wait_seconds=20)
            answer = await buffer.LeaseBatch(request, metadata=services.metadata())
        for sample in await read_batch(answer.batch, services):
            load.check(sample.sample >> 12, sample.token_ids, sample.logprobs, sample.loss_mask)
        commit = pb.CommitStepRequest(
            run_id=RUN, step=step, batch_id=answer.batch.batch_id, weights_digest=answer.batch.batch_id, trim=True
        )
        await buffer.CommitStep(commit, metadata=services.metadata())
    results.send(load.verified)


if __name__ == "__main__":
    main()
