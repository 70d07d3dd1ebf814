"""NATS loses a stream, a consumer, or messages while a run trains. The run continues within seconds
and trains every group once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import nats
import pytest
from mesh import Mesh, describe
from nats.js import JetStreamContext
from sim import Job, audited, finish, journals_agree, sim_mesh, stop, submit

from rollout import names

LIMIT_SECONDS = 15
"""Lost groups are issued again within 10 s. The rest is for the step."""

Loss = Callable[[JetStreamContext, str], Awaitable[object]]


def _stream(name: Callable[[str], str]) -> Loss:
    return lambda js, run: js.delete_stream(name(run))


def _consumer(name: Callable[[str], str], consumer: str) -> Loss:
    return lambda js, run: js.delete_consumer(name(run), consumer)


def _messages(name: Callable[[str], str]) -> Loss:
    return lambda js, run: js.purge_stream(name(run))


LOSSES: dict[str, Loss] = {
    "work stream": _stream(names.work_stream),
    "trajectory stream": _stream(names.traj_stream),
    "event stream": _stream(lambda _: names.EVENT_STREAM),
    "work consumer": _consumer(names.work_stream, names.WORKERS_CONSUMER),
    "trajectory consumer": _consumer(names.traj_stream, names.BUFFER_CONSUMER),
    "event consumer": _consumer(lambda _: names.EVENT_STREAM, names.STORAGE_CONSUMER),
    "work messages": _messages(names.work_stream),
    "trajectory messages": _messages(names.traj_stream),
}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_nats_loses_is_issued_again(mode: str, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", steps=26, mode=mode, staleness=2 if mode == "async" else 0)
    running = sim_mesh(tmp_path / "state", seconds=0.2).start()
    try:
        run = submit(running, running.plan(job.write()), job)
        step = 1
        for name, loss in LOSSES.items():
            running.until_step(run, step)
            asyncio.run(lose(running, run, loss))
            lost = time.monotonic()
            step = running.status(run).run.step + 2
            running.until_step(run, step)
            took = time.monotonic() - lost
            print(f"{mode}: two steps were committed {took:.1f} s after the loss of the {name}")
            assert took < LIMIT_SECONDS, f"{name}: {took:.1f} s; {describe(running.status(run))}"
        finish(running, run)
        assert audited(running, run)["whole"]
        journals_agree(running, run, job)
    finally:
        stop(running)


async def lose(running: Mesh, run: str, loss: Loss) -> None:
    daemon = running.daemon()
    client = await nats.connect(str(daemon["nats"]), token=running.token)
    try:
        await loss(client.jetstream(), run)
    finally:
        await client.close()
