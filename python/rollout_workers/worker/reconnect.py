"""Leaves a NATS server that has lost the route to a stream's leader."""

from __future__ import annotations

import json
import logging
import time

from nats.aio.client import Client
from nats.errors import Error as NatsError

log = logging.getLogger(__name__)

_ELECTION_SECONDS = 10.0  # longer than a leader election takes
_LULL_SECONDS = 30.0  # without a request for this long, a silence starts over
_ANSWER_SECONDS = 5.0
_NO_STREAM = 10059  # error code of the server


class Silence:
    """How long a stream has had no responder.

    A server of a cluster whose routes were cut may never learn that a stream has a leader, although
    its neighbors know. If there is no responder for longer than an election takes and the stream
    exists, the connection moves to another server.
    """

    def __init__(self, client: Client, stream: str) -> None:
        self._client, self._stream = client, stream
        self._since = self._last = 0.0  # monotonic seconds; 0: there was an answer

    async def record(self, unanswered: bool) -> None:
        """Record whether a request had no responder; after a long silence, reconnect to another
        server if there is one."""
        now = time.monotonic()
        if not unanswered:
            self._since = 0.0
            return
        if not self._since or now - self._last > _LULL_SECONDS:
            self._since = now
        self._last = now
        if now - self._since > _ELECTION_SECONDS and len(self._client.servers) > 1:
            self._since = 0.0
            if await self._is_there():
                log.warning("the NATS server has no responder for %s; reconnecting to another server", self._stream)
                await self._client.force_reconnect()

    async def _is_there(self) -> bool:
        """Whether the stream exists, or its existence is unknown."""
        try:
            answer = await self._client.request(f"$JS.API.STREAM.INFO.{self._stream}", b"", timeout=_ANSWER_SECONDS)
            return json.loads(answer.data).get("error", {}).get("err_code") != _NO_STREAM
        except (NatsError, TimeoutError, ValueError):
            return True
