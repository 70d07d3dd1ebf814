"""Publishes trajectories to JetStream and retries until the stream acknowledges them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from rollout_workers.worker.bus import ResponderWatch

log = logging.getLogger(__name__)

_ACK_SECONDS = 5.0
_RETRY_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0)
_OVERHEAD = 4096  # headers and protocol


class Publisher:
    """Publishes to one subject and waits for acks. Belongs to the worker's event loop."""

    def __init__(self, client: Client, subject: str, stream: str, process: str) -> None:
        """stream: the stream of the subject. process: a part of the message ids, by which the
        stream drops duplicates."""
        self._client, self._subject, self._stream, self._process = client, subject, stream, process
        self._serial = 0

    @property
    def most_bytes(self) -> int:
        """The largest payload that the server accepts."""
        return self._client.max_payload - _OVERHEAD

    async def publish(self, payload: bytes, headers: Mapping[str, str]) -> None:
        """Return when the stream has stored the payload. Retries until it succeeds or is
        cancelled."""
        self._serial += 1
        responders = ResponderWatch(self._client, self._stream)
        every = {**headers, "Nats-Msg-Id": f"{self._process}/{self._serial}"}
        attempt = 0
        while True:
            problem, no_responders = await self._try(payload, every)
            await responders.record(no_responders)
            if problem is None:
                if attempt > 1:
                    log.info("published to %s after %d failed attempts", self._subject, attempt)
                return
            if attempt == 1:
                log.warning("can't publish to %s: %s; retrying", self._subject, problem)
            await asyncio.sleep(_RETRY_SECONDS[min(attempt, len(_RETRY_SECONDS) - 1)])
            attempt += 1

    async def _try(self, payload: bytes, headers: dict[str, str]) -> tuple[str | None, bool]:
        """Make one attempt. Returns the problem as text (None: success), and whether the server
        reported that the subject has no responders."""
        try:
            answer = await self._client.request(self._subject, payload, timeout=_ACK_SECONDS, headers=headers)
        except TimeoutError:
            return f"no ack within {_ACK_SECONDS:g} s", False
        except NatsError as error:
            return repr(error), isinstance(error, NoRespondersError)
        try:
            body = json.loads(answer.data)
        except ValueError:
            return f"the answer is not an ack: {answer.data[:80]!r}", False
        error = body.get("error")
        return (f"{error.get('code')} {error.get('description')}" if error else None), False
