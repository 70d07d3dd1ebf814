"""Connections to NATS, and when to leave a server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Any

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import NoServersError

from rollout.run.v1.run_pb2 import NatsAccess, WorkerSpec
from rollout_workers.worker.credential import Token, of_server
from rollout_workers.worker.lifecycle import Lifecycle
from rollout_workers.worker.spec import Identity
from rollout_workers.worker.tls import of_nats

log = logging.getLogger(__name__)

_ELECTION_SECONDS = 10.0  # longer than a leader election takes
_IDLE_SECONDS = 30.0  # after this long without a request, the measurement starts again
_ANSWER_SECONDS = 5.0
_NO_STREAM = 10059  # error code of the server


def tls_of(access: NatsAccess, url: str) -> ssl.SSLContext | None:
    """The TLS context of a connection; None: plain text. Raises ``OSError`` if a file can't be
    read."""
    if not (access.ca_file or access.cert_file or url.startswith(("tls://", "wss://"))):
        return None
    return of_nats(access).context()


def credentials(access: NatsAccess, token: Token) -> dict[str, Any]:
    """The credentials as arguments of nats-py's ``connect``: an NKEY, a user, else the token, which
    each connection attempt reads again."""
    if access.nkey_seed:
        return {"nkeys_seed_str": access.nkey_seed}
    if access.user:
        return {"user": access.user, "password": access.password}
    return {"token": token if token() else None}


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
    token: Token,
    *,
    name: str,
    access: NatsAccess | None = None,
    run: str = "",
    reconnected: Callable[[], Awaitable[None]] | None = None,
    leaving: Callable[[], bool] = lambda: False,
) -> Client:
    """Connect to one of the comma-separated servers of ``url``. Retries forever, now and when the
    connection is lost.

    name: the name of the connection in the server's lists. access: credentials other than the
    token, and TLS. run: the run whose inboxes the connection uses. leaving: whether the process is
    shutting down; a lost connection is then not a warning.
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
            with contextlib.suppress(OSError):  # the files are being replaced; keep the certificates read before
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
                inbox_prefix=f"_INBOX_{run}" if run else "_INBOX",
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
            log.warning("can't connect to NATS at %s (%r); retrying", url, error)
            await asyncio.sleep(0.5)


async def connect_worker(spec: WorkerSpec, who: Identity, lifecycle: Lifecycle, reconnects: Reconnects) -> Client:
    """Connect a worker as its spec says, until its process leaves."""
    return await connect(
        spec.nats_url,
        of_server(spec, spec.nats_token),
        name=who.registration,
        access=spec.nats,
        run=spec.run_id,
        reconnected=reconnects.notify,
        leaving=lambda: lifecycle.leaving,
    )


class ResponderWatch:
    """Moves a connection to another server if the stream has had no responder for too long.

    A server of a cluster whose routes were cut may never learn that a stream has a leader, although
    its neighbors know. The connection moves if there is no responder for longer than an election
    takes and the stream exists.
    """

    def __init__(self, client: Client, stream: str) -> None:
        self._client, self._stream = client, stream
        self._since = self._last = 0.0  # monotonic seconds; 0: the last request had a responder

    async def record(self, unanswered: bool) -> None:
        """Record whether a request had no responder. If it has been so for too long, reconnect to
        another server of the cluster, if there is one."""
        now = time.monotonic()
        if not unanswered:
            self._since = 0.0
            return
        if not self._since or now - self._last > _IDLE_SECONDS:
            self._since = now
        self._last = now
        if now - self._since > _ELECTION_SECONDS and len(self._client.servers) > 1:
            self._since = 0.0
            if await self._stream_exists():
                log.warning("the NATS server has no responder for %s; reconnecting to another server", self._stream)
                await self._client.force_reconnect()

    async def _stream_exists(self) -> bool:
        """False only if the server reports that the stream does not exist."""
        try:
            answer = await self._client.request(f"$JS.API.STREAM.INFO.{self._stream}", b"", timeout=_ANSWER_SECONDS)
            return json.loads(answer.data).get("error", {}).get("err_code") != _NO_STREAM
        except (NatsError, TimeoutError, ValueError):
            return True
