"""Connections to NATS."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from nats.aio.client import Client
from nats.errors import NoServersError

log = logging.getLogger(__name__)


async def connect(
    url: str,
    token: str,
    *,
    name: str,
    reconnected: Callable[[], Awaitable[None]] | None = None,
    leaving: Callable[[], bool] = lambda: False,
) -> Client:
    """A connection that reconnects for ever, first tries included.

    name: what the server lists it as. leaving: whether the process is about to leave anyway; then a server that goes first is no
    news.
    """

    async def on_error(error: Exception) -> None:
        log.debug("nats (%s): %r", name, error)

    client = Client()

    async def on_disconnect() -> None:
        if client.is_closed or client.is_draining or leaving():
            log.debug("the connection to NATS ended (%s)", name)
            return
        log.warning("lost the connection to NATS (%s); reconnecting", name)

    async def on_reconnect() -> None:
        log.info("connected to NATS again (%s)", name)
        if reconnected is not None:
            await reconnected()

    while True:
        try:
            await client.connect(
                url,
                token=token or None,
                name=name,
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.2,  # type: ignore[arg-type] (seconds; typed as int)
                connect_timeout=2,
                ping_interval=5,
                max_outstanding_pings=3,
                pending_size=64 << 20,
                error_cb=on_error,
                disconnected_cb=on_disconnect,
                reconnected_cb=on_reconnect,
            )
            return client
        except (TimeoutError, OSError, NoServersError) as error:
            log.warning("NATS at %s can't be reached (%r); trying on", url, error)
            await asyncio.sleep(0.5)
