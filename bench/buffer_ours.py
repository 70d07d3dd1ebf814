"""One run of rolloutd's buffer for bench/buffer.py: a producer and a consumer, one process each, through rollout.client.buffer.

python bench/buffer_ours.py SHAPE SHARE DURABILITY FOLDER
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from buffer_load import IN_FLIGHT, Load, Shape, shape_of

from rollout.client.buffer import Ledger, Sample, connect

BIN = Path(__file__).resolve().parent.parent / "bin"


def main() -> None:
    shape = shape_of(sys.argv[1], float(sys.argv[2]))
    folder = tempfile.mkdtemp(dir=sys.argv[4], prefix="bench-buffer-")
    command = [BIN / "rolloutd", "--state-dir", folder, "--buffer-durability", sys.argv[3]]
    with open(Path(folder, "log"), "w") as log:
        daemon = subprocess.Popen(command, stderr=log)
    try:
        announced = Path(folder, "rolloutd.json")
        while not announced.exists() or not announced.read_text():
            time.sleep(0.01)
        run(folder, shape)
    finally:
        daemon.terminate()
        daemon.wait(20)
        shutil.rmtree(folder)


def run(state: str, shape: Shape) -> None:
    with connect(state=state) as buffer:
        buffer.open("bench", Ledger(group_size=shape.size, groups_per_step=shape.batch, rows=shape.groups))
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    consumer = context.Process(target=consume, args=(state, shape, there))
    consumer.start()
    load = Load(shape)
    samples = [Sample(*arrays) for arrays in zip(load.ids, load.logprobs, load.mask, strict=True)]
    with connect(state=state) as buffer, buffer.producer("bench", in_flight=IN_FLIGHT) as producer:
        here.recv()
        print("begin", flush=True)
        for group in range(shape.groups):
            load.stamp(group)
            producer.put(group, samples)
        verified = here.recv()
        print("end", json.dumps({"verified": verified}), flush=True)
    consumer.join()


def consume(state: str, shape: Shape, results: Connection) -> None:
    load = Load(shape)
    with connect(state=state) as buffer:
        results.send("ready")
        for batch in buffer.consumer("bench", steps=shape.groups // shape.batch):
            for group in batch.groups:
                for number, sample in enumerate(group):
                    load.check(number, sample.token_ids, sample.logprobs, sample.loss_mask)
            batch.commit(trim=True)
    results.send(load.verified)


if __name__ == "__main__":
    main()
