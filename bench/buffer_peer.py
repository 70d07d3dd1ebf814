"""One round of a peer for bench/buffer.py, in the environment of scripts/venv_buffer: producer and
consumer, one process each.

python bench/buffer_peer.py SHAPE SHARE transferqueue|ray|zeromq

The driver of the peer (its servers started) is the producer; it prints "begin" and "end" around
what is measured.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from buffer_load import IN_FLIGHT, Load, Shape, finish, shape_of


def main() -> None:
    shape = shape_of(sys.argv[1], float(sys.argv[2]))
    {"transferqueue": transfer_queue, "ray": ray_objects, "zeromq": zeromq}[sys.argv[3]](shape)


def start_ray(shape: Shape) -> None:
    import ray

    store = 2 * shape.groups * shape.group_bytes + (256 << 20)  # no spilling to disk
    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=store, log_to_driver=False, logging_level="ERROR")


def transfer_queue(shape: Shape) -> None:
    """Its controller, two SimpleStorage units (its default) and the consumer are actors. A put is
    one group."""
    import ray
    import torch
    import transfer_queue as tq
    from omegaconf import OmegaConf
    from tensordict import TensorDict

    start_ray(shape)
    tq.init(OmegaConf.create({"controller": {"polling_mode": True}}))  # otherwise a get that must wait polls every 5 s

    @ray.remote(num_cpus=0)
    class Consumer:
        def __init__(self) -> None:
            tq.init()
            self.client = tq.get_client()
            self.load = Load(shape)

        def ready(self) -> bool:
            return True

        def meta(self) -> Any:
            fields = ["ids", "logprobs", "mask", "sample"]
            return self.client.get_meta(
                data_fields=fields, batch_size=shape.batch * shape.size, partition_id="p", task_name="train"
            )

        def run(self) -> int:
            for _ in range(shape.groups // shape.batch):
                while not (meta := self.meta()).size:
                    time.sleep(0.002)
                data = self.client.get_data(meta)
                columns = [[row.numpy() for row in data[name].unbind(0)] for name in ("ids", "logprobs", "mask", "sample")]
                for ids, logprobs, mask, number in zip(*columns, strict=True):
                    self.load.check(int(number[0]), ids, logprobs, mask)
                self.client.clear_samples(meta)
            return self.load.verified

    load = Load(shape)
    numbers = torch.arange(shape.size).unsqueeze(1)
    consumer = Consumer.remote()
    ray.get(consumer.ready.remote())
    client = tq.get_client()

    async def produce() -> None:
        room = asyncio.Semaphore(IN_FLIGHT)

        async def put(data: TensorDict) -> None:
            try:
                await client.async_put(data=data, partition_id="p")
            finally:
                room.release()

        tasks = []
        for group in range(shape.groups):
            await room.acquire()
            load.stamp(group)
            data = {
                "ids": torch.from_numpy(load.ids.copy()),  # the array is read after this returns
                "logprobs": torch.from_numpy(load.logprobs),
                "mask": torch.from_numpy(load.mask),
                "sample": numbers,
            }
            tasks.append(asyncio.create_task(put(TensorDict(data, batch_size=shape.size))))
        await asyncio.gather(*tasks)

    print("begin", flush=True)
    result = consumer.run.remote()
    asyncio.run(produce())
    finish(ray.get(result))
    tq.close()
    ray.shutdown()


def ray_objects(shape: Shape) -> None:
    """A group is one object. References are passed in a call of the consumer, one batch at a
    time."""
    import ray

    start_ray(shape)

    @ray.remote(num_cpus=0)
    class Consumer:
        def __init__(self) -> None:
            self.load = Load(shape)

        def ready(self) -> bool:
            return True

        def take(self, references: list) -> int:
            for ids, logprobs, mask in ray.get(references):
                for number in range(shape.size):
                    self.load.check(number, ids[number], logprobs[number], mask[number])
            return self.load.verified

    consumer = Consumer.remote()
    ray.get(consumer.ready.remote())
    load = Load(shape)

    def put(ids: object) -> object:
        return ray.put((ids, load.logprobs, load.mask))

    print("begin", flush=True)
    results = []
    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        for first in range(0, shape.groups, shape.batch):
            puts = []
            for group in range(first, first + shape.batch):
                if len(puts) >= IN_FLIGHT:
                    puts[-IN_FLIGHT].result()
                load.stamp(group)
                puts.append(threads.submit(put, load.ids.copy()))
            results.append(consumer.take.remote([done.result() for done in puts]))
    finish(max(ray.get(results)))
    ray.shutdown()


def zeromq(shape: Shape) -> None:
    """A group is one multipart message of raw buffers, without copies. The consumer acknowledges
    each message; nothing is stored."""
    import zmq

    load = Load(shape)
    context = zmq.Context()
    out, acks = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    path = f"ipc:///tmp/bench-buffer-{os.getpid()}"
    out.bind(path + "-out")
    acks.bind(path + "-back")
    consumer = multiprocessing.get_context("spawn").Process(target=consume_messages, args=(shape, path))
    consumer.start()
    acks.recv()
    print("begin", flush=True)
    unacknowledged = 0
    for group in range(shape.groups):
        load.stamp(group)
        while unacknowledged >= IN_FLIGHT:
            acks.recv()
            unacknowledged -= 1
        # The token ids change with every group, so they are copied; other arrays are sent from
        # their memory.
        out.send_multipart([load.ids.tobytes(), load.logprobs, load.mask], copy=False)
        unacknowledged += 1
    for _ in range(unacknowledged):
        acks.recv()
    finish(int(acks.recv()))
    consumer.join()
    context.destroy()
    os.unlink(path[6:] + "-out")
    os.unlink(path[6:] + "-back")


def consume_messages(shape: Shape, path: str) -> None:
    import numpy as np
    import zmq

    load = Load(shape)
    context = zmq.Context()
    messages, acks = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    messages.connect(path + "-out")
    acks.connect(path + "-back")
    acks.send(b"ready")
    of = (shape.size, shape.tokens)
    for _ in range(shape.groups):
        ids, logprobs, mask = (frame.buffer for frame in messages.recv_multipart(copy=False))
        acks.send(b"")
        rows = zip(
            np.frombuffer(ids, np.int32).reshape(of),
            np.frombuffer(logprobs, np.float32).reshape(of),
            np.frombuffer(mask, np.uint8).reshape(of),
            strict=True,
        )
        for number, row in enumerate(rows):
            load.check(number, *row)
    acks.send(str(load.verified).encode())
    context.destroy(linger=2000)


if __name__ == "__main__":
    main()
