"""A network that a test can cut."""

from __future__ import annotations

import asyncio
import contextlib
from urllib.parse import urlparse


class Proxy:
    """Forwards TCP to a target. ``cut`` drops every connection and refuses new ones until
    ``fix``."""

    def __init__(self, target: str) -> None:
        """target: ``nats://host:port``."""
        parsed = urlparse(target)
        self._host, self._port = parsed.hostname, parsed.port
        self._writers: set[asyncio.StreamWriter] = set()
        self._whole = True
        self._server: asyncio.Server | None = None
        self.url = ""

    async def start(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def cut(self) -> None:
        self._whole = False
        for writer in list(self._writers):
            writer.transport.abort()

    def fix(self) -> None:
        self._whole = True

    async def stop(self) -> None:
        self.cut()
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._whole:
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection(self._host, self._port)
        self._writers |= {writer, back}
        await asyncio.gather(_pump(reader, back), _pump(there, writer))
        self._writers -= {writer, back}


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
