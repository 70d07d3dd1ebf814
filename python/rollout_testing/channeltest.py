"""The conformance suite that every channel between ranks passes.

@pytest.mark.parametrize("case", CASES)
async def test_channel(case: str) -> None:
    await run(case, harness)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import numpy as np
import torch

from rollout_workers.multistep.channel import Channel
from rollout_workers.multistep.errors import ChannelClosed, ChannelFull

CAPACITY = 8
KEY = "0_1_train"


class Harness(Protocol):
    """A channel under test."""

    def open(self) -> AbstractAsyncContextManager[tuple[Channel, Channel]]:
        """The sender's and the receiver's end of a new channel whose keys hold ``CAPACITY`` items,
        closed on exit. They may be the same object."""
        ...


Check = Callable[[Channel, Channel], Awaitable[None]]
CASES: dict[str, Check] = {}


def case(check: Check) -> Check:
    """Register a check."""
    CASES[check.__name__] = check
    return check


async def run(name: str, harness: Harness) -> None:
    """Run one check of the suite."""
    async with asyncio.timeout(60), harness.open() as (sender, receiver):
        await CASES[name](sender, receiver)


@case
async def items_arrive_once_in_order(sender: Channel, receiver: Channel) -> None:
    """Many more items than the capacity, with a receiver that is slower than the sender."""
    count = 12 * CAPACITY

    async def send() -> None:
        for n in range(count):
            await sender.room(KEY)
            sender.put({"n": n}, KEY)

    sending = asyncio.create_task(send())
    got = [(await receiver.get(KEY))["n"] for _ in range(count)]
    await sending
    assert got == list(range(count)), got
    await nothing_left(receiver)


@case
async def every_kind_of_value_arrives(sender: Channel, receiver: Channel) -> None:
    """Values and types are those that were put."""
    tensors = {
        name: torch.arange(6).reshape(2, 3).to(getattr(torch, name))
        for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
    }
    item = {
        "obs": {**tensors, "task_descriptions": ["push", "lift ü"], "none": None, "deep": {"er": torch.zeros(0, 3)}},
        "scalar": torch.tensor(-0.0),
        "bits": torch.tensor([float("nan"), float("inf"), 1e-45]),
        "part": torch.arange(20).reshape(4, 5)[1:3, ::2],
        "array": np.array([[1, 2], [3, 4]], dtype=np.int16)[:, ::-1],
        "empty": [{}, [], ()],
        "failures": {3: ("ENVIRONMENT_FAILED", "a message"), -1: ("A", "")},
        "plain": [True, False, 1, -(1 << 62), 0.1, float("-inf"), "", b"\x00\xff", None],
    }
    sender.put(item, KEY)
    same(item, await receiver.get(KEY), "item")
    for other in (None, torch.ones(2, 1), np.zeros((2, 2, 3), np.float32), [1], "text", 7):
        sender.put(other, KEY)
        same(other, await receiver.get(KEY), "item")


@case
async def large_items_arrive_between_small_ones(sender: Channel, receiver: Channel) -> None:
    """40 MB, which is more than a broker takes in one message."""
    large = torch.arange(10_000_000, dtype=torch.float32)
    for item in ({"n": 1}, {"large": large}, {"n": 2}):
        sender.put(item, KEY)
    assert await receiver.get(KEY) == {"n": 1}
    assert torch.equal((await receiver.get(KEY))["large"], large)
    assert await receiver.get(KEY) == {"n": 2}


@case
async def keys_are_independent(sender: Channel, receiver: Channel) -> None:
    """A key whose items are not taken does not delay others, and both directions work."""
    for n in range(CAPACITY):
        sender.put(n, "0_0_train")
    sender.put("eval", "0_0_eval")
    sender.put("other", "0_1_train")
    assert await receiver.get("0_1_train") == "other"
    assert await receiver.get("0_0_eval") == "eval"
    receiver.put("back", "1_0_train")
    assert await sender.get("1_0_train") == "back"
    assert [await receiver.get("0_0_train") for _ in range(CAPACITY)] == list(range(CAPACITY))


@case
async def a_full_key_refuses_until_an_item_is_taken(sender: Channel, receiver: Channel) -> None:
    """The bound is per key, and nothing that was refused arrives."""
    waiting = asyncio.create_task(receiver.get(KEY))
    sender.put("first", KEY)
    assert await waiting == "first"
    for n in range(CAPACITY):
        await within(20, sender.room(KEY))
        sender.put(n, KEY)
    try:
        sender.put("refused", KEY)
        raise AssertionError("a full key took an item")
    except ChannelFull as error:
        assert error.reason == "CHANNEL_FULL" and KEY in str(error) and str(CAPACITY) in str(error)
    sender.put("other key", "5_5_train")
    room = asyncio.create_task(sender.room(KEY))
    await asyncio.sleep(0.2)
    assert not room.done(), "room returned for a full key"
    assert await receiver.get(KEY) == 0
    await within(20, room)
    sender.put(CAPACITY, KEY)
    assert [await receiver.get(KEY) for _ in range(CAPACITY)] == list(range(1, CAPACITY + 1))


@case
async def a_cancelled_get_removes_nothing(sender: Channel, receiver: Channel) -> None:
    """At whatever moment it is cancelled."""
    got: list[int] = []
    for n in range(40):
        getting = asyncio.create_task(receiver.get(KEY))
        await asyncio.sleep(0.001 * (n % 4))
        sender.put(n, KEY)
        for _ in range(n % 7):
            await asyncio.sleep(0)
        getting.cancel()
        try:
            got.append(await getting)
        except asyncio.CancelledError:
            got.append(await receiver.get(KEY))
    assert got == list(range(40)), got


@case
async def a_closed_sender_ends_the_key_after_its_items(sender: Channel, receiver: Channel) -> None:
    """``put`` of a closed channel raises at once."""
    waiting = asyncio.create_task(receiver.get("2_2_train"))
    await asyncio.sleep(0.05)
    sender.put("only", "2_2_train")
    assert await waiting == "only"
    waiting = asyncio.create_task(receiver.get("2_2_train"))
    for n in range(3):
        sender.put(n, KEY)
    assert await receiver.get(KEY) == 0
    await sender.close()
    await sender.close()
    for refused in (lambda: sender.put(9, KEY), lambda: sender.put(9, "3_3_train")):
        try:
            refused()
            raise AssertionError("a closed channel took an item")
        except ChannelClosed as error:
            assert error.reason == "CHANNEL_CLOSED"
    await raises_closed(sender.room(KEY))
    assert [await receiver.get(KEY) for _ in range(2)] == [1, 2]
    await raises_closed(receiver.get(KEY))
    await raises_closed(waiting)


@case
async def a_closed_receiver_gets_no_more(sender: Channel, receiver: Channel) -> None:
    """A call that waits ends, too."""
    waiting = asyncio.create_task(receiver.get(KEY))
    await asyncio.sleep(0.05)
    await receiver.close()
    await raises_closed(waiting)
    await raises_closed(receiver.get(KEY))


async def within(seconds: float, call: Awaitable[Any]) -> Any:
    """The result of ``call``. Raises ``TimeoutError``."""
    async with asyncio.timeout(seconds):
        return await call


async def raises_closed(call: Awaitable[Any]) -> None:
    """``call`` must raise :class:`ChannelClosed`."""
    try:
        found = await within(20, call)
    except ChannelClosed:
        return
    raise AssertionError(f"a closed channel returned {found!r}")


async def nothing_left(receiver: Channel) -> None:
    """No further item of ``KEY`` may arrive."""
    try:
        found = await within(0.3, receiver.get(KEY))
    except TimeoutError:
        return
    raise AssertionError(f"one more item arrived: {found!r}")


def same(put: Any, got: Any, where: str) -> None:
    """Types, and values to the bit."""
    assert type(put) is type(got), f"{where}: {type(put)} arrived as {type(got)}"
    if isinstance(put, dict):
        assert list(put) == list(got), f"{where}: {list(put)} arrived as {list(got)}"
        for key in put:
            same(put[key], got[key], f"{where}.{key}")
    elif isinstance(put, (list, tuple)):
        assert len(put) == len(got), where
        for place, (one, other) in enumerate(zip(put, got, strict=True)):
            same(one, other, f"{where}[{place}]")
    elif isinstance(put, (torch.Tensor, np.ndarray)):
        assert put.dtype == got.dtype and put.shape == got.shape, where
        bits, others = (torch.as_tensor(np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x) for x in (put, got))
        assert bits.contiguous().reshape(-1).view(torch.uint8).equal(others.contiguous().reshape(-1).view(torch.uint8)), where
    else:
        assert put == got, f"{where}: {put!r} arrived as {got!r}"
