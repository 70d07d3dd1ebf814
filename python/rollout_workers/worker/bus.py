"""Connections to NATS."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from nats.aio.client import Client
from nats.errors import NoServersError

from rollout.run.v1.run_pb2 import NatsAccess
from rollout_workers.worker.tls import of_nats

log = logging.getLogger(__name__)


def tls_of(access: NatsAccess, url: str) -> ssl.SSLContext | None:
    """The TLS that a connection needs; None: plain text. Raises OSError where a file can't be
    read."""
    if not (access.ca_file or access.cert_file or url.startswith(("tls://", "wss://"))):
        return None
    return of_nats(access).context()


def credentials(access: NatsAccess, token: str) -> dict[str, Any]:
    """Arguments of nats-py's ``connect`` that say who we are: an NKEY, a user, else the token."""
    if access.nkey_seed:
        return {"nkeys_seed_str": access.nkey_seed}
    if access.user:
        return {"user": access.user, "password": access.password}
    return {"token": token or None}


class Reconnects:
    """Notifies subscribers after a connection was lost and restored. Belongs to the event loop."""

    def __init__(self) -> None:
        self._subscribers: list[Callable[[], None]] = []

    def subscribe(self, subscriber: Callable[[], None]) -> None:
        self._subscribers.append(subscriber)

    async def notify(self) -> None:
        for subscriber in self._subscribers:
            subscriber()


async def connect(
    url: str,
    token: str,
    *,
    name: str,
    access: NatsAccess | None = None,
    reconnected: Callable[[], Awaitable[None]] | None = None,
    leaving: Callable[[], bool] = lambda: False,
) -> Client:
    """A connection to any of the comma-separated servers of ``url``. It never stops trying to
    connect or reconnect.

    name: what the server lists it as. access: credentials other than the token, and TLS. leaving:
    whether the process is about to leave anyway; then a server that goes first is no news.
    """
    access = access or NatsAccess()
    context = tls_of(access, url)

    async def on_error(error: Exception) -> None:
        log.debug("nats (%s): %r", name, error)

    client = Client()

    async def on_disconnect() -> None:
        if client.is_closed or client.is_draining or leaving():
            log.debug("the connection to NATS ended (%s)", name)
            return
        log.warning("lost the connection to NATS (%s); reconnecting", name)
        if context is not None:
            with contextlib.suppress(OSError):  # half of a renewal; what was read before is shown again
                of_nats(access).reload(context)

    async def on_reconnect() -> None:
        log.info("connected to NATS again (%s)", name)
        if reconnected is not None:
            await reconnected()

    while True:
        try:
            await client.connect(
                [server.strip() for server in url.split(",")],
                **credentials(access, token),
                tls=context,
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
