"""Work items: pulled within the room there is, held while they are worked on, given back, dealt out
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
from rollout_workers.worker import reconnect
from rollout_workers.worker.bus import connect
from rollout_workers.worker.heartbeat import Heartbeat
from rollout_workers.worker.spec import Identity
from rollout_workers.worker.stream import WorkItem, WorkQueue, _Requests


class Hand:
    """A worker that only collects."""

    def __init__(self) -> None:
        self.items: list[WorkItem] = []

    def take(self, items: list[WorkItem]) -> None:
        self.items.extend(items)

    @property
    def positions(self) -> list[int]:
        return sorted(item.group.position for item in self.items)


async def queue_for(url: str, daemon: Daemon, who: Identity, heartbeat: Heartbeat) -> tuple[WorkQueue, Hand]:
    queues: list[WorkQueue] = []

    async def reconnected() -> None:
        queues[0].reconnected()

    hand = Hand()
    client = await connect(url, daemon.token, name="test", reconnected=reconnected)
    queues.append(WorkQueue(client, heartbeat, who.work_stream, hand.take))
    await queues[0].start()
    return queues[0], hand


async def close(queue: WorkQueue) -> None:
    await queue.stop()
    await queue._client.close()


@pytest.fixture
def groups(who: Identity) -> list:
    return [prompt_group(i, b'{"prompt": "1+1="}', run=who.run) for i in range(12)]


async def test_takes_no_more_than_there_is_room_for(
    daemon: Daemon, who: Identity, heartbeat: Heartbeat, streams: RunStreams, groups: list
) -> None:
    queue, hand = await queue_for(daemon.nats_url, daemon, who, heartbeat)
    queue.set_room(5)
    await streams.issue(groups)
    await until(lambda: len(hand.items) == 5)
    queue.set_room(0)
    await queue.ack(hand.items[:2])
    await until(lambda: _left(streams, 10))
    assert len(hand.items) == 5
    queue.set_room(7)
    await until(lambda: len(hand.items) == 12)
    assert hand.positions == list(range(12))
    assert {item.deliveries for item in hand.items} == {1}
    await queue.ack(hand.items)
    await until(lambda: _left(streams, 0))
    await close(queue)


async def test_what_is_given_back_goes_to_another_worker_at_once(
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
async def test_stops_although_it_is_woken_in_the_same_moment(
    daemon: Daemon, who: Identity, heartbeat: Heartbeat, streams: RunStreams, turns: int
) -> None:
    queue, _ = await queue_for(daemon.nats_url, daemon, who, heartbeat)
    for _ in range(3):
        await asyncio.sleep(0)  # it waits now
    queue.reconnected()  # wakes it
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await queue.stop()
    await close(queue)


async def test_a_blocked_event_loop_loses_no_item(
    daemon: Daemon, who: Identity, heartbeat: Heartbeat, streams: RunStreams, groups: list
) -> None:
    queue, hand = await queue_for(daemon.nats_url, daemon, who, heartbeat)
    queue.set_room(2)
    await streams.issue(groups[:2])
    await until(lambda: len(hand.items) == 2)
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


async def test_an_item_that_is_not_held_any_more_is_redelivered(
    daemon: Daemon, who: Identity, heartbeat: Heartbeat, streams: RunStreams, groups: list
) -> None:
    queue, hand = await queue_for(daemon.nats_url, daemon, who, heartbeat)
    queue.set_room(4)
    await streams.issue(groups[:1])
    await until(lambda: len(hand.items) == 1)
    heartbeat.release(hand.items[0].reply)  # as if the process were gone
    await until(lambda: len(hand.items) == 2)
    assert hand.items[1].deliveries == 2
    await close(queue)


async def test_goes_on_after_the_connection_was_cut(
    daemon: Daemon, who: Identity, heartbeat: Heartbeat, streams: RunStreams, groups: list
) -> None:
    proxy = await Proxy(daemon.nats_url).start()
    queue, hand = await queue_for(proxy.url, daemon, who, heartbeat)
    queue.set_room(12)
    await streams.issue(groups[:4])
    await until(lambda: len(hand.items) == 4)
    proxy.cut()
    await streams.issue(groups[4:8])
    proxy.fix()
    await until(lambda: set(hand.positions) == set(range(8)))
    await close(queue)
    await proxy.stop()


async def test_waits_for_a_stream_that_is_not_there_yet(
    daemon: Daemon, who: Identity, heartbeat: Heartbeat, groups: list
) -> None:
    queue, hand = await queue_for(daemon.nats_url, daemon, who, heartbeat)
    queue.set_room(4)
    await until(lambda: queue._missing)
    streams = await RunStreams.open(daemon, who.run)
    await streams.issue(groups[:4])
    await until(lambda: len(hand.items) == 4)
    await close(queue)
    await streams.close()


class TwoServers:
    """A connection to the first of two servers, where pull requests have no responders; the second
    one's stream answers."""

    servers = ("first", "second")
    moves = 0
    asked = 0
    info = b'{"config": {}}'  # what is said of the stream

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


async def test_a_server_that_knows_nobody_is_left(monkeypatch: pytest.MonkeyPatch, heartbeat: Heartbeat) -> None:
    monkeypatch.setattr(reconnect, "_ELECTION_SECONDS", 0.3)
    client = TwoServers()
    queue = WorkQueue(cast(Client, client), heartbeat, "WORK_run", lambda items: None)
    await queue.start()
    queue.set_room(4)
    await until(lambda: client.moves == 1 and not queue._silence._since)
    await queue.stop()
    assert client.moves == 1


async def test_no_server_is_left_for_a_stream_that_nowhere_is(monkeypatch: pytest.MonkeyPatch, heartbeat: Heartbeat) -> None:
    monkeypatch.setattr(reconnect, "_ELECTION_SECONDS", 0.3)
    client = TwoServers()
    client.info = b'{"error": {"code": 404, "err_code": 10059, "description": "stream not found"}}'
    queue = WorkQueue(cast(Client, client), heartbeat, "WORK_run", lambda items: None)
    await queue.start()
    queue.set_room(4)
    await until(lambda: client.asked >= 2)
    await queue.stop()
    assert not client.moves


async def test_a_pause_between_two_refusals_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    client, now = TwoServers(), [100.0]
    monkeypatch.setattr(reconnect.time, "monotonic", lambda: now[0])
    silence = reconnect.Silence(cast(Client, client), "WORK_run")
    for seconds, moves in ((0.0, 0), (60.0, 0), (9.0, 0), (0.5, 0), (1.0, 1)):
        now[0] += seconds
        await silence.record(True)
        assert client.moves == moves


async def test_a_message_that_is_no_work_is_dropped(
    daemon: Daemon, who: Identity, heartbeat: Heartbeat, streams: RunStreams, groups: list
) -> None:
    queue, hand = await queue_for(daemon.nats_url, daemon, who, heartbeat)
    queue.set_room(4)
    await streams.js.publish(f"rollout.work.{who.run}", b"\xff\xff\xff")
    await streams.issue(groups[:1])
    await until(lambda: len(hand.items) == 1)
    await queue.ack(hand.items)
    await until(lambda: _left(streams, 0))
    await close(queue)


def test_books_of_requests_are_right_in_any_order() -> None:
    requests = _Requests()
    requests.open("a", 4)
    requests.open("b", 4)
    requests.received()  # belongs to b, is booked on a
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
