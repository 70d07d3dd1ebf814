"""Groups that were not started wait for a free slot, or move to an idle worker."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from rollout.run.v1.run_pb2 import PromptGroup
from rollout_testing.daemon import Daemon
from rollout_testing.engine import ScriptedEngine
from rollout_testing.run import Example, RunStreams, config, prompt_group, spec
from rollout_testing.services import Host, buffer_double
from rollout_testing.waiting import until
from rollout_testing.worker import InProcess
from rollout_workers.data.prompts import Text
from rollout_workers.inference.model import Model
from rollout_workers.inference.puller import Puller
from rollout_workers.inference.receipt import EngineReceipts
from rollout_workers.worker.stream import WorkItem, WorkQueue

GROUP = 4


class Recorder:
    """A work queue that only records calls."""

    def __init__(self) -> None:
        self.rooms: list[int] = []
        self.back: list[WorkItem] = []

    def set_room(self, items: int) -> None:
        self.rooms.append(items)

    async def ack(self, items: list[WorkItem]) -> None:
        pass

    async def give_back(self, items: list[WorkItem]) -> None:
        self.back.extend(items)

    async def stop(self) -> None:
        pass


@pytest.fixture
def queue() -> Recorder:
    return Recorder()


@pytest.fixture
def begun() -> list[int]:
    return []


@pytest.fixture
def puller(queue: Recorder, begun: list[int]) -> Puller:
    """A puller for which two groups fill the engine, and two more may wait."""
    made = Puller(
        None,
        capacity=4,
        slots=2 * GROUP,
        group_size=GROUP,
        prepare=lambda items: None,
    )
    made.start(cast(WorkQueue, queue), lambda items: begun.extend(item.group.position for item in items))
    return made


def items(*positions: int, arrived: float = 0.0) -> list[WorkItem]:
    return [
        WorkItem(PromptGroup(position=n, index=n, group_size=GROUP), f"reply.{n}", deliveries=1, arrived=arrived)
        for n in positions
    ]


async def test_a_group_starts_when_a_slot_is_free(puller: Puller, begun: list[int], queue: Recorder) -> None:
    puller.deliver(items(3, 1, 0, 2))
    assert begun == [0, 1] and puller.waiting == 2 and queue.rooms[-1] == 0
    puller.sampled("0/0/0")
    assert begun == [0, 1, 2], "one of the slots is free"
    for _ in range(GROUP - 1):
        puller.sampled("0/0/0")
    assert begun == [0, 1, 2], "four more samples than slots were begun, and four have ended"
    puller.sampled("0/1/0")
    assert begun == [0, 1, 2, 3]
    await puller.done(items(0))
    assert queue.rooms[-1] == 1


async def test_almost_finished_groups_do_not_delay_others(puller: Puller, begun: list[int], queue: Recorder) -> None:
    puller.deliver(items(0, 1, 2, 3))
    for group in range(2):
        for _ in range(GROUP - 1):
            puller.sampled(f"0/{group}/0")
    assert begun == [0, 1, 2, 3], "one sample of each is left, and there were slots for six more"
    assert queue.rooms[-1] == 1, "ten samples are left: there is room for one whole group of the sixteen"
    puller.deliver(items(4))
    assert begun[-1] != 4 and puller.waiting == 1


async def test_the_number_of_groups_that_wait_for_a_reward_is_limited(puller: Puller, queue: Recorder) -> None:
    for group in range(2 * GROUP):
        puller.deliver(items(group))
        for _ in range(GROUP):
            puller.sampled(f"0/{group}/0")
    assert puller.active == 2 * GROUP and queue.rooms[-1] == 0


async def test_a_group_that_fails_frees_its_slots(puller: Puller, begun: list[int]) -> None:
    puller.deliver(items(0, 1, 2))
    await puller.drop(items(0))
    assert begun == [0, 1, 2] and puller.free == 0


async def test_a_paused_worker_starts_and_holds_nothing(queue: Recorder, begun: list[int]) -> None:
    receipts = EngineReceipts(cast(Any, None))
    puller = Puller(receipts, capacity=4, slots=2 * GROUP, group_size=GROUP, prepare=lambda items: None)
    puller.start(cast(WorkQueue, queue), lambda items: begun.extend(item.group.position for item in items))
    puller.deliver(items(0, 1, 2))
    await puller.pause()
    assert begun == [0, 1] and puller.active == 2, "samples in progress stay"
    assert [item.group.position for item in queue.back] == [2] and queue.rooms[-1] == 0
    puller.sampled("0/0/0")
    await puller.done(items(0))
    puller.deliver(items(3))  # it was requested before the pause
    await until(lambda: len(queue.back) == 2)
    receipts.changed.set()  # of an update that reached the paused engine
    await asyncio.sleep(0)
    assert begun == [0, 1] and puller.waiting == 0 and queue.rooms[-1] == 0
    puller.resume()
    assert queue.rooms[-1] == 3
    puller.deliver(items(3))
    assert begun == [0, 1, 3]
    await puller.stop()


async def test_waiting_groups_are_shared_last_first(puller: Puller, begun: list[int], queue: Recorder) -> None:
    puller.deliver(items(0, 1, 2, 3))
    assert [item.group.position for item in await puller.share(1, age=0.5)] == [3]
    assert [item.group.position for item in queue.back] == [3]
    assert queue.rooms[-1] == 0, "what is given away is not asked for again"
    assert await puller.share(5, age=1e12) == [], "it has just come"
    assert [item.group.position for item in await puller.share(5, age=0.5)] == [2]
    assert await puller.share(5, age=0.5) == [], "what was begun stays"
    puller.sampled("0/0/0")
    assert queue.rooms[-1] == 2, "it has caught up"
    assert begun == [0, 1]


async def test_groups_that_wait_for_weights_are_not_shared(queue: Recorder) -> None:
    class Old:
        version = 3
        changed = asyncio.Event()

    made = Puller(cast(Any, Old()), capacity=4, slots=4, prepare=lambda i: None)
    made.start(cast(WorkQueue, queue), lambda i: None)
    waits = WorkItem(PromptGroup(position=9, group_size=GROUP, min_version=4), "reply.9", deliveries=1)
    made.deliver([waits])
    assert made.waiting == 1 and made.ready() == [] and await made.share(1, age=0.5) == []
    await made.stop()


async def test_a_worker_with_newer_weights_gets_the_groups_that_need_them(queue: Recorder) -> None:
    """So that a worker that cannot load new weights does not hold work back."""

    class Receipts:
        version = 3
        changed = asyncio.Event()

    receipts, begun = Receipts(), []
    made = Puller(cast(Any, receipts), capacity=4, slots=2 * GROUP, group_size=GROUP, prepare=lambda items: None)
    made.start(cast(WorkQueue, queue), lambda items: begun.extend(items))
    waits = WorkItem(PromptGroup(position=9, group_size=GROUP, min_version=4), "reply.9", deliveries=1)
    made.deliver([waits])
    assert made.overdue(0.5) and not made.overdue(1e12)
    assert await made.share(1, 0.5, version=3) == [] and await made.share(1, 1e12, version=4) == []
    assert await made.share(1, 0.5, version=4) == [waits]
    assert queue.rooms[-1] == 0, "the slots are free, but the next group needs newer weights too"
    made.deliver([waits])
    receipts.version = 4
    receipts.changed.set()
    await until(lambda: _begun(begun))
    assert queue.rooms[-1] > 0
    await made.stop()


async def _begun(items: list[WorkItem]) -> bool:
    return bool(items)


async def test_an_idle_worker_gets_waiting_groups_of_a_slow_one(
    daemon: Daemon, example: Example, run: str, streams: RunStreams, text: Text
) -> None:
    buffer = buffer_double()
    host = Host(daemon)
    host.buffer(buffer)
    await host.start()
    few = config(example, engine={"slots": GROUP})
    slow, idle = (ScriptedEngine(lambda request, sample: [5, 0]) for _ in range(2))
    await slow.pause()
    first = await InProcess(spec(daemon, few, run=run), model=Model(slow, text)).start()
    rows = example.rows(2)
    await streams.issue([prompt_group(n, rows[n], run=run) for n in range(2)])
    await until(lambda: _unacknowledged(streams, 2))
    second = await InProcess(spec(daemon, few, run=run, number=1), model=Model(idle, text)).start()
    shared = await streams.collect(GROUP)
    assert {(e.header.key.index, e.header.worker_id) for e in shared} == {(1, "inference-1")}
    assert buffer.asked == [(0, 1)], "it was delivered before, so the ledger is asked what it lacks"
    await slow.resume()
    own = await streams.collect(GROUP)
    assert {(e.header.key.index, e.header.worker_id) for e in own} == {(0, "inference-0")}
    await until(lambda: _left(streams, 0))
    assert (len(slow.requests), len(idle.requests)) == (1, 1)
    await first.stop()
    await second.stop()
    await host.stop()


async def _unacknowledged(streams: RunStreams, groups: int) -> bool:
    return (await streams.js.consumer_info(f"WORK_{streams.run}", "workers")).num_ack_pending == groups


async def _left(streams: RunStreams, groups: int) -> bool:
    return await streams.work_left() == groups
