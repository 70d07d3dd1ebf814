"""The interface for running plugins, and its simplest implementation. ``child.py`` and
``sidecar.py`` have the other two."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from rollout.hosting import wire
from rollout.hosting.host import Host, Source
from rollout.plugin.v1 import plugin_pb2 as pb


class Runner(Protocol):
    """Runs plugins. Belongs to one event loop; calls may overlap."""

    async def start(self) -> pb.HandshakeResponse:
        """Load the plugins, or connect to them. Raises ``RolloutError``."""
        ...

    async def call(self, method: str, request: Any, timeout: float) -> Any:
        """Call a method of PluginService. Raises ``RolloutError``: the plugin's own, or a timeout
        after ``timeout`` seconds."""
        ...

    async def close(self) -> None:
        """Stop what ``start`` started; idempotent."""
        ...


class InProcess:
    """Runs plugins in this process, blocking functions in threads. Python can't stop a thread, so a
    function that never returns occupies its thread. Use it for trusted code only."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = list(sources)
        self._threads = ThreadPoolExecutor(4, "plugin")
        self._host = Host({})

    async def start(self) -> pb.HandshakeResponse:
        self._host = await asyncio.to_thread(Host.load, self._sources, self._threads)
        return await self.call("Handshake", pb.HandshakeRequest(schema_version=wire.SCHEMA_VERSION), 10.0)

    async def call(self, method: str, request: Any, timeout: float) -> Any:
        try:
            async with asyncio.timeout(timeout):
                return await self._host.call(method, request)
        except TimeoutError:
            raise wire.timeout_error(method, timeout, wire.describe(method, request)) from None

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
