"""Events and log records reach the stream in batches, and never hold anybody up."""

from __future__ import annotations

import logging
import time

from rollout.event.v1 import event_pb2 as pb
from rollout_testing.run import RunStreams
from rollout_workers.worker.events import EventHandler, Events, ulid
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


async def test_a_flood_of_warnings_is_one_and_a_count(streams: RunStreams, heartbeat: Heartbeat, who: Identity) -> None:
    events = Events(who, heartbeat)
    logger = logging.Logger("harness")
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


async def test_close_sends_what_is_held(streams: RunStreams, heartbeat: Heartbeat, who: Identity) -> None:
    events = Events(who, heartbeat)
    events.emit("worker.note", "the last words")
    events.close()
    [event] = await received(streams, who, 1)
    assert event.message == "the last words"


def test_without_nats_nothing_blocks_and_the_oldest_go(who: Identity) -> None:
    away = Heartbeat("nats://127.0.0.1:1", "", name="test")
    away.start()
    events = Events(who, away)
    events.start()
    for number in range(20_000):
        events.emit("log", str(number))
    assert len(events._held) == 10_000
    assert events._held[0].message == "10000"
    events.close(0.1)
    away.stop()


def test_ulids_sort_by_time() -> None:
    assert ulid(1) < ulid(2) < ulid(1 << 40)
    drawn = ulid(time.time_ns() // 1_000_000)
    assert len(drawn) == 26
    assert drawn == drawn.lower(), "the control plane's ids are lowercase"
