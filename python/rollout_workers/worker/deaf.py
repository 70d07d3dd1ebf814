"""NATS servers of a cluster that bring messages to nobody."""

from __future__ import annotations

import json
import logging
import time

from nats.aio.client import Client
from nats.errors import Error as NatsError

log = logging.getLogger(__name__)

_ELECTION_SECONDS = 10.0  # a stream's next leader is there long before
_LULL_SECONDS = 30.0  # after such a time without a question a silence is another one
_ANSWER_SECONDS = 5.0
_NO_STREAM = 10059  # error code of the server


class Silence:
    """Since when nobody has answered for a stream.

    A server of a cluster whose routes were cut can miss for ever that a stream has a leader, while its neighbours know: where
    nobody answers for as long as no election takes, although the stream is there, the connection goes to another server.
    """

    def __init__(self, client: Client, stream: str) -> None:
        self._client, self._stream = client, stream
        self._since = self._last = 0.0  # monotonic seconds; 0: somebody has answered

    async def heard(self, nobody: bool) -> None:
        """Take what became of a message: whether the server knew of nobody. Leave it where that lasts and there is another."""
        now = time.monotonic()
        if not nobody:
            self._since = 0.0
            return
        if not self._since or now - self._last > _LULL_SECONDS:
            self._since = now
        self._last = now
        if now - self._since > _ELECTION_SECONDS and len(self._client.servers) > 1:
            self._since = 0.0
            if await self._is_there():
                log.warning("the NATS server knows nobody for %s; going to another one", self._stream)
                await self._client.force_reconnect()

    async def _is_there(self) -> bool:
        """Whether the stream exists, as far as anybody says."""
        try:
            answer = await self._client.request(f"$JS.API.STREAM.INFO.{self._stream}", b"", timeout=_ANSWER_SECONDS)
            return json.loads(answer.data).get("error", {}).get("err_code") != _NO_STREAM
        except (NatsError, TimeoutError, ValueError):
            return True
