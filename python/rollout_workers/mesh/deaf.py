"""NATS servers of a cluster that bring messages to nobody."""

from __future__ import annotations

import logging
import time

from nats.aio.client import Client

log = logging.getLogger(__name__)

_ELECTION_SECONDS = 10.0  # a stream's next leader is there long before


class Silence:
    """Since when nobody has answered on a subject.

    A server of a cluster whose routes were cut can miss for ever that a stream has a leader, while its neighbours know: where
    nobody answers for as long as no election takes, the connection goes to another server.
    """

    def __init__(self, client: Client, subject: str) -> None:
        self._client, self._subject = client, subject
        self._since: float | None = None  # monotonic seconds

    async def heard(self, nobody: bool) -> None:
        """Take whether the server knows of nobody; leave it where that lasts and there is another one."""
        if not nobody:
            self._since = None
            return
        now = time.monotonic()
        self._since = self._since or now
        if now - self._since > _ELECTION_SECONDS and len(self._client.servers) > 1:
            log.warning("the NATS server knows nobody for %s; going to another one", self._subject)
            await self._client.force_reconnect()
            self._since = None
