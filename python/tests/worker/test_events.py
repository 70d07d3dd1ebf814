"""Events and log records reach the stream in batches, and callers never wait for NATS. Repeated
warnings are sent once with a count."""

from __future__ import annotations

import asyncio
import logging
import time

from rollout.event.v1 import event_pb2 as pb
from rollout_testing.run import RunStreams
from rollout_workers.worker.credential import NO_TOKEN
from rollout_workers.worker.events import REPEAT_SECONDS, EventHandler, Events, Repeats, ulid
from rollout_workers.worker.heartbeat import Heartbeat
from rollout_workers.worker.spec import Identity


async def received(streams: RunStreams, who: Identity, count: int) -> list[pb.Event]:
    puller = await streams.js.pull_subscribe(who.event_subject, stream="EVENTS")
    events: list[pb.Event] = []
    while len(events) < count:
        for message in await puller.fetch(1, timeout=60):
            events.extend(pb.EventBatch.FromString(message.data).events)
    await puller.unsubscribe()
    return events


async def test_events_and_logs_arrive_in_order(streams: RunStreams, heartbeat: Heartbeat, who: Identity) -> None:
    events = Events(who, heartbeat)
    events.start()
    logger = logging.Logger("trainer")
    logger.addHandler(EventHandler(events))
    events.emit("sampling", step=3, metrics={"samples_per_second": 2.5})
    logger.warning("took %d s", 7)
    try:
        raise ValueError("no")
    except ValueError:
        logger.exception("failed")
    sampling, warning, failure = await received(streams, who, 3)
    assert (sampling.kind, sampling.step, dict(sampling.metrics)) == ("sampling", 3, {"samples_per_second": 2.5})
    assert sampling.run_id == who.run
    assert sampling.service == "inference-worker/inference-0"
    assert (warning.kind, warning.level, warning.message) == ("log", pb.LEVEL_WARN, "took 7 s")
    assert warning.attributes["logger"] == "trainer"
    assert failure.level == pb.LEVEL_ERROR and "ValueError: no" in failure.message
    assert len({event.event_id for event in (sampling, warning, failure)}) == 3
    assert abs(sampling.time.ToNanoseconds() - time.time_ns()) < 60e9
    events.close()


async def test_repeated_warnings_are_sent_once_with_a_count(streams: RunStreams, heartbeat: Heartbeat, who: Identity) -> None:
    events = Events(who, heartbeat)
    logger = logging.Logger("rewards")
    logger.addHandler(EventHandler(events))
    for number in range(50):
        logger.warning("the reward of %d samples took longer than 5 s", number)
        logger.info("step %d", number)
    events.close()
    events_received = await received(streams, who, 52)
    first, last = [event for event in events_received if event.level == pb.LEVEL_WARN]
    assert "repeated" not in first.attributes
    assert (last.attributes["repeated"], last.message) == ("49", "the reward of 49 samples took longer than 5 s")
    assert sum(event.level == pb.LEVEL_INFO for event in events_received) == 50


async def test_a_worker_may_read_the_acks_of_its_events(streams: RunStreams, heartbeat: Heartbeat, who: Identity) -> None:
    async def send() -> bytes:
        client = await heartbeat.client()
        return (await client.request(who.event_subject, pb.EventBatch().SerializeToString(), timeout=5)).data

    answer = await asyncio.wrap_future(heartbeat.submit(send()))
    assert b'"stream":"EVENTS"' in answer.replace(b" ", b"")


async def test_close_sends_buffered_events(streams: RunStreams, heartbeat: Heartbeat, who: Identity) -> None:
    events = Events(who, heartbeat)
    events.emit("worker.note", "the last words")
    events.close()
    [event] = await received(streams, who, 1)
    assert event.message == "the last words"


def test_without_nats_emit_does_not_block_and_the_oldest_events_are_dropped(who: Identity) -> None:
    away = Heartbeat("nats://127.0.0.1:1", NO_TOKEN, name="test")
    away.start()
    events = Events(who, away)
    events.start()
    for number in range(20_000):
        events.emit("log", str(number))
    assert len(events._buffered) == 10_000
    assert events._buffered[0].message == "10000"
    events.close(0.1)
    away.stop()


def test_ulids_sort_by_time() -> None:
    assert ulid(1) < ulid(2) < ulid(1 << 40)
    drawn = ulid(time.time_ns() // 1_000_000)
    assert len(drawn) == 26
    assert drawn == drawn.lower(), "ids of the control plane are in lower case"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_sends_the_first_of_equal_warnings_and_counts_the_others() -> None:
    clock = Clock()
    repeats: Repeats[int] = Repeats(clock)
    admitted = [
        repeats.admit("log", f"`score` raised ValueError: can't read '{word}' of sample {number}", number)
        for number, word in enumerate(("a", "b1", "c d", "d"))
    ]
    assert admitted == [True, False, False, False]
    assert repeats.admit("log", "the disk is full", 9)
    assert repeats.admit("another", "`score` raised ValueError: can't read 'x' of sample 1", 8)
    assert list(repeats.due()) == []
    clock.now = REPEAT_SECONDS
    assert list(repeats.due()) == [(3, 3)]
    assert list(repeats.due()) == []


def test_sends_at_once_after_a_pause() -> None:
    clock = Clock()
    repeats: Repeats[int] = Repeats(clock)
    assert repeats.admit("log", "slow", 1)
    clock.now = REPEAT_SECONDS
    assert list(repeats.due()) == []
    assert repeats.admit("log", "slow", 2)


def test_sends_counted_warnings_at_the_end() -> None:
    repeats: Repeats[int] = Repeats(Clock())
    assert repeats.admit("log", "slow", 1)
    assert not repeats.admit("log", "slow", 2)
    assert list(repeats.due(all=True)) == [(2, 1)]
    assert list(repeats.due(all=True)) == []
