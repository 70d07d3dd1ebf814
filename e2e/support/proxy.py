"""A TCP proxy that can drop, delay, hold, cut, and half-close connections.

One thread serves all links. The methods of `Link` may be called from other threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

CHUNK = 1 << 16


@dataclass(eq=False)
class _Pair:
    """A connection of a client, and the proxy's connection to the server."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter

    def reset(self) -> None:
        for writer in (self.client, self.server):
            with contextlib.suppress(OSError, AttributeError):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


@dataclass(eq=False)
class Link:
    """A listener and its target."""

    name: str
    listen: tuple[str, int]
    target: tuple[str, int]
    loop: asyncio.AbstractEventLoop
    pairs: set[_Pair] = field(default_factory=set)
    _delay: float = 0.0
    _refusing: bool = False
    _left: int | None = None
    """Number of bytes after which the connection that carries them is cut."""
    _going: asyncio.Event = field(default_factory=asyncio.Event)

    def drop(self) -> None:
        """Reset all connections."""
        self._soon(lambda: [pair.reset() for pair in tuple(self.pairs)])

    def refuse(self) -> None:
        """Reset all connections, and each new one, until `heal`."""
        self._soon(lambda: setattr(self, "_refusing", True))
        self.drop()

    def delay(self, seconds: float) -> None:
        """Delay all data by ``seconds``, until `heal`."""
        self._soon(lambda: setattr(self, "_delay", seconds))

    def hold(self) -> None:
        """Hold all data until `heal`. The peers receive nothing."""
        self._soon(self._going.clear)

    def cut(self, size: int) -> None:
        """Reset the connection that carries the byte with this number, counted from now."""
        self._soon(lambda: setattr(self, "_left", size))

    def half_close(self, to_server: bool) -> None:
        """Close one direction of every connection; the other stays open."""

        def close() -> None:
            for pair in self.pairs:
                with contextlib.suppress(OSError, RuntimeError):
                    (pair.server if to_server else pair.client).write_eof()

        self._soon(close)

    def heal(self) -> None:
        """Pass all data on again, including held data."""

        def whole() -> None:
            self._delay, self._refusing, self._left = 0.0, False, None
            self._going.set()

        self._soon(whole)

    def _soon(self, call: Callable[[], object]) -> None:
        self.loop.call_soon_threadsafe(call)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._refusing:
                raise OSError("refused")
            away, there = await asyncio.open_connection(*self.target)
        except OSError:
            _Pair(writer, writer).reset()
            return
        pair = _Pair(writer, there)
        self.pairs.add(pair)
        try:
            await asyncio.gather(self._carry(pair, reader, there), self._carry(pair, away, writer))
        except asyncio.CancelledError:  # the proxy stops
            pass
        finally:
            self.pairs.discard(pair)
            for each in (writer, there):
                each.transport.abort()

    async def _carry(self, pair: _Pair, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(CHUNK):
                if self._delay:
                    await asyncio.sleep(self._delay)
                await self._going.wait()
                if self._left is not None:
                    self._left -= len(data)
                    if self._left < 0:
                        data, self._left = data[: self._left], None
                        writer.write(data)
                        await writer.drain()
                        pair.reset()
                        return
                writer.write(data)
                await writer.drain()
            await self._going.wait()  # the end of a connection is held too
            writer.write_eof()
        except (OSError, RuntimeError):  # a half-closed connection accepts no more data
            if not writer.is_closing() and not writer.transport.is_closing():
                pair.reset()


class Proxy:
    """The links of all connections, by name."""

    def __init__(self) -> None:
        self.links: dict[str, Link] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()

    def link(self, name: str, listen: tuple[str, int], target: tuple[str, int]) -> Link:
        """Open a link."""

        async def opened() -> Link:
            link = Link(name, listen, target, self._loop)
            link.heal()
            await asyncio.start_server(link.serve, *listen, limit=CHUNK)
            return link

        self.links[name] = asyncio.run_coroutine_threadsafe(opened(), self._loop).result(10)
        return self.links[name]

    def heal(self) -> None:
        for link in self.links.values():
            link.heal()

    def stop(self) -> None:
        async def ended() -> None:
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(ended(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


def trouble(link: Link, dice: random.Random) -> tuple[str, float]:
    """Inject a random fault into a link. Returns its description, and the seconds after which it
    must be healed."""
    kind = dice.choice(("drop", "refuse", "delay", "hold", "cut", "half close"))
    if kind == "drop":
        link.drop()
        return kind, 0.0
    if kind == "refuse":
        link.refuse()
        return kind, dice.uniform(0.05, 3.0)
    if kind == "delay":
        link.delay(dice.uniform(0.01, 0.5))
        return kind, dice.uniform(0.5, 5.0)
    if kind == "hold":
        link.hold()
        return kind, dice.uniform(0.05, 6.0)
    if kind == "cut":
        link.cut(dice.randrange(1, 20000))
        return kind, 2.0
    link.half_close(dice.random() < 0.5)
    return kind, 0.0
