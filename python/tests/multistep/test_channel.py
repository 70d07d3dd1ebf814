"""Channels between ranks: the conformance suite, and what only channels over NATS do."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch
from nats.aio.client import Client
from nats.errors import Error as NatsError

from rollout_testing.channeltest import CAPACITY, CASES, KEY, run, within
from rollout_testing.credential import worker_token
from rollout_testing.daemon import Daemon
from rollout_testing.proxy import Proxy
from rollout_testing.waiting import until
from rollout_workers.multistep import Channel, MemoryChannel
from rollout_workers.multistep.errors import BatchInvalid, ChannelClosed, KeyInvalid, PeerLost
from rollout_workers.multistep.nats_channel import NatsChannel
from rollout_workers.multistep.values import decode_item, encode_item
from rollout_workers.worker.bus import connect
from rollout_workers.worker.credential import Token

_numbers = itertools.count()


class Memory:
    @asynccontextmanager
    async def open(self) -> AsyncIterator[tuple[Channel, Channel]]:
        channel = MemoryChannel(CAPACITY)
        yield channel, channel


class Nats:
    """Both ends are connected with the credentials of workers."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self.run = f"run-channel-{next(_numbers)}"
        self.settings: dict[str, Any] = {
            "capacity": CAPACITY,
            "beat_seconds": 0.1,
            "resend_seconds": 0.1,
            "silence_seconds": 30.0,
        }

    async def client(self, url: str = "", run: str = "") -> Client:
        token = Token(worker_token(self._daemon.token, run or self.run, "environment"))
        return await connect(url or self._daemon.nats_url, token, name="test", run=run or self.run)

    def end(self, client: Client, **settings: Any) -> NatsChannel:
        return NatsChannel(client, self.run, "observations", **{**self.settings, **settings})

    @asynccontextmanager
    async def open(self, url: str = "") -> AsyncIterator[tuple[NatsChannel, NatsChannel]]:
        clients = [await self.client(url), await self.client()]
        ends = [self.end(client) for client in clients]
        try:
            yield ends[0], ends[1]
        finally:
            for end, client in zip(ends, clients, strict=True):
                await vanish(end)
                await client.close()


async def vanish(channel: NatsChannel) -> None:
    """End a channel as the death of its process does."""
    channel._task.cancel()
    await asyncio.gather(channel._task, return_exceptions=True)
    for subscription in channel._subscriptions():
        with contextlib.suppress(NatsError):  # closed before
            await subscription.unsubscribe()


@pytest.fixture
def nats(daemon: Daemon) -> Nats:
    return Nats(daemon)


@pytest.mark.parametrize("case", CASES)
async def test_memory(case: str) -> None:
    await run(case, Memory())


@pytest.mark.parametrize("case", CASES)
async def test_nats(case: str, nats: Nats) -> None:
    await run(case, nats)


async def test_items_survive_lost_connections(nats: Nats, daemon: Daemon) -> None:
    proxy = await Proxy(daemon.nats_url).start()
    async with asyncio.timeout(60), nats.open(proxy.url) as (sender, receiver):

        async def send() -> None:
            for n in range(60):
                await sender.room(KEY)
                sender.put({"n": n, "data": torch.full((300_000,), n)}, KEY)

        sending, got = asyncio.create_task(send()), []
        for n in range(60):
            if n % 30 == 10:
                proxy.cut()
                await asyncio.sleep(0.2)
                proxy.fix()
            item = await receiver.get(KEY)
            assert bool((item["data"] == item["n"]).all())
            got.append(item["n"])
        await sending
        assert got == list(range(60))
        with pytest.raises(TimeoutError):
            await within(0.5, receiver.get(KEY))
    await proxy.stop()


async def test_a_new_receiver_gets_what_was_not_taken_and_a_new_sender_continues(nats: Nats) -> None:
    async with asyncio.timeout(60), nats.open() as (sender, receiver):
        for n in range(6):
            sender.put(n, KEY)
        assert [await receiver.get(KEY) for _ in range(2)] == [0, 1]
        await until(lambda: sender._outgoing[KEY].items == 4)  # the sender knows
        await vanish(receiver)
        client = await nats.client()
        successor = nats.end(client)
        assert [await successor.get(KEY) for _ in range(2)] == [2, 3]
        await vanish(sender)
        other = nats.end(client)
        other.put("new", KEY)
        assert [await successor.get(KEY) for _ in range(3)] == [4, 5, "new"]
        await other.close()
        with pytest.raises(ChannelClosed):
            await successor.get(KEY)
        await successor.close()
        await client.close()


async def test_a_lost_peer_is_an_error_that_names_it(nats: Nats) -> None:
    nats.settings |= {"silence_seconds": 0.6}
    async with asyncio.timeout(60), nats.open() as (sender, receiver):
        began = time.monotonic()
        with pytest.raises(PeerLost, match=r"the sender of the key '7_7_train' has shown no life for 0\.6 s"):
            await receiver.get("7_7_train")
        assert 0.5 < time.monotonic() - began < 20
        sender.put("only", KEY)
        assert await receiver.get(KEY) == "only"
        waiting = asyncio.create_task(receiver.get(KEY))
        await asyncio.sleep(1.5)
        assert not waiting.done()  # the sender sends nothing, but it lives
        await vanish(sender)
        with pytest.raises(PeerLost):
            await waiting
        for n in range(CAPACITY):
            receiver.put(n, "1_0_train")
        with pytest.raises(PeerLost, match="the receiver of the key '1_0_train'"):
            await receiver.room("1_0_train")


async def test_close_reports_items_that_did_not_arrive(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_workers.multistep.nats_channel._CLOSE_SECONDS", 0.3)
    async with asyncio.timeout(60), nats.open() as (sender, _):
        sender.put(1, "4_4_train")
        with pytest.raises(PeerLost, match="items of the keys 4_4_train did not arrive"):
            await sender.close()


async def test_other_runs_can_neither_send_nor_listen(nats: Nats) -> None:
    async with asyncio.timeout(60), nats.open() as (sender, receiver):
        other = await nats.client(run="run-other")
        intruder = nats.end(other)
        intruder.put("forged", KEY)
        heard = asyncio.create_task(intruder.get("1_1_train"))
        sender.put("secret", "1_1_train")
        await asyncio.sleep(0.5)
        assert not heard.done()
        heard.cancel()
        sender.put("genuine", KEY)
        assert await receiver.get(KEY) == "genuine"
        await vanish(intruder)
        await other.close()


async def test_names_that_no_subject_can_have_are_refused(nats: Nats) -> None:
    async with nats.open() as (sender, receiver):
        for key in ("", "a.b", "a b", "*", "x" * 65):
            with pytest.raises(KeyInvalid, match="can't be a key"):
                sender.put(1, key)
            with pytest.raises(KeyInvalid):
                await receiver.get(key)


class Thing:
    pass


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"obs": {"x": [1, Thing()]}}, r"`item.obs.x\[1\]` is a Thing; send tensors"),
        ({"obs": torch.zeros(1, dtype=torch.complex64)}, "`item.obs` has the dtype torch.complex64; send one of float64"),
        ([np.array(["a"])], r"`item\[0\]` has the dtype <U1"),
        ({(1, 2): 3}, r"`item` has a key \(1, 2\), not a text or an integer"),
        (1 << 63, "`item` has the integer 9223372036854775808, which 64 bits can't hold"),
        (__import__("functools").reduce(lambda inner, _: [inner], range(40), 0), "is nested in more than 32 levels"),
    ],
)
def test_items_that_no_message_can_have_are_refused(item: Any, message: str) -> None:
    with pytest.raises(BatchInvalid, match=message):
        encode_item(item)


def test_scalars_of_numpy_become_pythons_and_broken_items_are_refused() -> None:
    assert decode_item(encode_item([np.float32(0.5), np.int64(3), np.bool_(True)])) == [0.5, 3, True]
    with pytest.raises(BatchInvalid, match="2 bytes are not an item"):
        decode_item(b"\xff\xff")
