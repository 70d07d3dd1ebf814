"""Pulling work items: within the free capacity, with extended ack deadlines, returned and delivered
again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import cast

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from rollout_testing.daemon import Daemon
from rollout_testing.proxy import Proxy
from rollout_testing.run import RunStreams, prompt_group
from rollout_testing.waiting import until
from rollout_workers.worker import bus
from rollout_workers.worker.bus import connect
from rollout_workers.worker.credential import Token
from rollout_workers.worker.heartbeat import Heartbeat
from rollout_workers.worker.spec import Identity
from rollout_workers.worker.stream import WorkItem, WorkQueue, _Requests


class Collector:
    """Collects the delivered items."""

    def __init__(self) -> None:
        self.items: list[WorkItem] = []

    def take(self, items: list[WorkItem]) -> None:
        self.items.extend(items)

    @property
    def positions(self) -> list[int]:
        return sorted(item.group.position for item in self.items)


async def queue_for(url: str, daemon: Daemon, who: Identity, heartbeat: Heartbeat) -> tuple[WorkQueue, Collector]:
    queues: list[WorkQueue] = []

    async def reconnected() -> None:
        queues[0].reconnected()

    collector = Collector()
    client = await connect(url, Token(daemon.token), name="test", reconnected=reconnected)
    queues.append(WorkQueue(client, heartbeat, who.work_stream, collector.take))
    await queues[0].start()
    return queues[0], collector


async def close(queue: WorkQueue) -> None:
    await queue.stop()
    await queue._client.close()


@pytest.fixture
def groups(who: Identity) -> list:
    return [prompt_group(i, b'{"prompt": "1+1="}', run=who.run) for i in range(12)]


async def test_pulls_no_more_items_than_there_is_room_for(
    daemon: Daemon, who: Identity, heartbeat: Heartbeat, streams: RunStreams, groups: list
) -> None:
    queue, collector = await queue_for(daemon.nats_url, daemon, who, heartbeat)
    queue.set_room(5)
    await streams.issue(groups)
    await until(lambda: len(collector.items) == 5)
    queue.set_room(0)
    await queue.ack(collector.items[:2])
    await until(lambda: _left(streams, 10))
    assert len(collector.items) == 5
    queue.set_room(7)
    await until(lambda: len(collector.items) == 12)
    assert collector.positions == list(range(12))
    assert {item.deliveries for item in collector.items} == {1}
    await queue.ack(collector.items)
    await until(lambda: _left(streams, 0))
    await close(queue)


async def test_returned_items_are_delivered_to_another_worker_at_once(
    daemon: Daemon, who: Identity, heartbeat: Heartbeat, streams: RunStreams, groups: list
) -> None:
    first, mine = await queue_for(daemon.nats_url, daemon, who, heartbeat)
    first.set_room(12)
    await streams.issue(groups)
    await until(lambda: len(mine.items) == 12)
    second, theirs = await queue_for(daemon.nats_url, daemon, who, heartbeat)
    second.set_room(12)
    await streams.redeliver_after(600)
    await first.stop()
    await first.give_back(mine.items)
    await until(lambda: len(theirs.items) == 12)
    assert {item.deliveries for item in theirs.items} == {2}
    await close(first)
    await close(second)


@pytest.mark.parametrize("turns", range(6))
async def test_stops_while_a_reconnect_wakes_it(
    daemon: Daemon, who: Identity, heartbeat: Heartbeat, streams: RunStreams, turns: int
) -> None:
    queue, _ = await queue_for(daemon.nats_url, daemon, who, heartbeat)
    for _ in range(3):
        await asyncio.sleep(0)  # until the queue waits
    queue.reconnected()  # wakes the queue
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await queue.stop()
    await close(queue)


async def test_a_blocked_event_loop_loses_no_item(
    daemon: Daemon, who: Identity, heartbeat: Heartbeat, streams: RunStreams, groups: list
) -> None:
    queue, collector = await queue_for(daemon.nats_url, daemon, who, heartbeat)
    queue.set_room(2)
    await streams.issue(groups[:2])
    await until(lambda: len(collector.items) == 2)
    queue.set_room(0)
    end = time.monotonic() + 5  # longer than the ack wait of 4 s
    while time.monotonic() < end:
        sum(range(10_000))
    other, theirs = await queue_for(daemon.nats_url, daemon, who, heartbeat)
    other.set_room(2)
    await streams.issue(groups[2:3])
    await until(lambda: len(theirs.items) == 1)
    assert theirs.positions == [2]
    await close(queue)
    await close(other)


async def test_an_item_without_progress_acks_is_delivered_again(
    daemon: Daemon, who: Identity, heartbeat: Heartbeat, streams: RunStreams, groups: list
) -> None:
    queue, collector = await queue_for(daemon.nats_url, daemon, who, heartbeat)
    queue.set_room(4)
    await streams.issue(groups[:1])
    await until(lambda: len(collector.items) == 1)
    heartbeat.release(collector.items[0].reply)  # as if the process had died
    await until(lambda: len(collector.items) == 2)
    assert collector.items[1].deliveries == 2
    await close(queue)


async def test_pulls_again_after_the_connection_was_cut(
    daemon: Daemon, who: Identity, heartbeat: Heartbeat, streams: RunStreams, groups: list
) -> None:
    proxy = await Proxy(daemon.nats_url).start()
    queue, collector = await queue_for(proxy.url, daemon, who, heartbeat)
    queue.set_room(12)
    await streams.issue(groups[:4])
    await until(lambda: len(collector.items) == 4)
    proxy.cut()
    await streams.issue(groups[4:8])
    proxy.fix()
    await until(lambda: set(collector.positions) == set(range(8)))
    await close(queue)
    await proxy.stop()


async def test_waits_for_a_stream_that_does_not_exist_yet(
    daemon: Daemon, who: Identity, heartbeat: Heartbeat, groups: list
) -> None:
    queue, collector = await queue_for(daemon.nats_url, daemon, who, heartbeat)
    queue.set_room(4)
    await until(lambda: queue._missing)
    streams = await RunStreams.open(daemon, who.run)
    await streams.issue(groups[:4])
    await until(lambda: len(collector.items) == 4)
    await close(queue)
    await streams.close()


class TwoServers:
    """A connection to two servers. The first reports no responders; the second has the stream."""

    servers = ("first", "second")
    moves = 0
    asked = 0
    info = b'{"config": {}}'  # the answer to a request for the stream's info

    def new_inbox(self) -> str:
        return "_INBOX.test"

    async def subscribe(self, subject: str, cb: Callable[[Msg], Awaitable[None]], **options: object) -> SimpleNamespace:
        self.answer = cb
        return SimpleNamespace(drain=lambda: asyncio.sleep(0))

    async def request(self, subject: str, payload: bytes, **options: object) -> SimpleNamespace:
        self.asked += 1
        return SimpleNamespace(data=self.info)

    async def publish(self, subject: str, body: bytes, reply: str) -> None:
        status = "100" if self.moves else "503"
        await self.answer(cast(Msg, SimpleNamespace(subject=reply, reply="", headers={"Status": status})))

    async def force_reconnect(self) -> None:
        self.moves += 1


async def test_moves_to_another_server_if_the_first_has_no_responders(
    monkeypatch: pytest.MonkeyPatch, heartbeat: Heartbeat
) -> None:
    monkeypatch.setattr(bus, "_ELECTION_SECONDS", 0.3)
    client = TwoServers()
    queue = WorkQueue(cast(Client, client), heartbeat, "WORK_run", lambda items: None)
    await queue.start()
    queue.set_room(4)
    await until(lambda: client.moves == 1 and not queue._responders._since)
    await queue.stop()
    assert client.moves == 1


async def test_keeps_the_connection_if_the_stream_does_not_exist(monkeypatch: pytest.MonkeyPatch, heartbeat: Heartbeat) -> None:
    monkeypatch.setattr(bus, "_ELECTION_SECONDS", 0.3)
    client = TwoServers()
    client.info = b'{"error": {"code": 404, "err_code": 10059, "description": "stream not found"}}'
    queue = WorkQueue(cast(Client, client), heartbeat, "WORK_run", lambda items: None)
    await queue.start()
    queue.set_room(4)
    await until(lambda: client.asked >= 2)
    await queue.stop()
    assert not client.moves


async def test_an_idle_time_does_not_count_as_missing_responders(monkeypatch: pytest.MonkeyPatch) -> None:
    client, now = TwoServers(), [100.0]
    monkeypatch.setattr(bus.time, "monotonic", lambda: now[0])
    responders = bus.ResponderWatch(cast(Client, client), "WORK_run")
    for seconds, moves in ((0.0, 0), (60.0, 0), (9.0, 0), (0.5, 0), (1.0, 1)):
        now[0] += seconds
        await responders.record(True)
        assert client.moves == moves


async def test_a_message_that_is_not_a_prompt_group_is_dropped(
    daemon: Daemon, who: Identity, heartbeat: Heartbeat, streams: RunStreams, groups: list
) -> None:
    queue, collector = await queue_for(daemon.nats_url, daemon, who, heartbeat)
    queue.set_room(4)
    await streams.js.publish(f"rollout.work.{who.run}", b"\xff\xff\xff")
    await streams.issue(groups[:1])
    await until(lambda: len(collector.items) == 1)
    await queue.ack(collector.items)
    await until(lambda: _left(streams, 0))
    await close(queue)


def test_counts_of_requested_items_are_right_in_any_order() -> None:
    requests = _Requests()
    requests.open("a", 4)
    requests.open("b", 4)
    requests.received()  # of b, but counted for a

    requests.ended("a", 4)
    assert requests.items == 3
    requests.ended("b", 3)
    assert requests.items == 0
    requests.ended("gone", 5)
    assert requests.items == 0


async def _left(streams: RunStreams, items: int) -> bool:
    return await streams.work_left() == items


async def test_two_workers_share_the_work(
    daemon: Daemon, who: Identity, heartbeat: Heartbeat, streams: RunStreams, groups: list
) -> None:
    first, mine = await queue_for(daemon.nats_url, daemon, who, heartbeat)
    second, theirs = await queue_for(daemon.nats_url, daemon, who, heartbeat)
    first.set_room(12)
    second.set_room(12)
    await until(lambda: _asking(streams, 2))
    await streams.issue(groups)
    await until(lambda: len(mine.items) + len(theirs.items) == 12)
    assert min(len(mine.items), len(theirs.items)) >= 4
    await asyncio.gather(close(first), close(second))


async def _asking(streams: RunStreams, pulls: int) -> bool:
    return (await streams.js.consumer_info(f"WORK_{streams.run}", "workers")).num_waiting == pulls
