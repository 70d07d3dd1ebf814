"""Moves work from slow workers to idle ones.

A worker with free slots and no work publishes how many groups it has room for, and its weights
version. One of the workers with waiting groups receives the message (through a NATS queue group)
and gives some of them back to JetStream, which delivers them to the idle worker. If no worker is
idle, or no worker has groups to spare, nothing is sent. A worker that could not load new weights
gives back the groups that need them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from rollout_workers.inference.puller import Puller
from rollout_workers.worker.stream import WorkQueue

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""Seconds between two checks. An idle worker waits this long before it requests groups, and a group
must wait this long before it is given back."""
_MOST_LOOKS = 16  # between two requests of a worker that stays idle, for example because all workers wait for the learner
_OVERDUE_SECONDS = 2.0  # after which a group that waits for weights is given to a worker that has them
_QUEUE_GROUP = "waiting-groups"


class Sharing:
    """Requests and gives back groups. Belongs to the worker's event loop."""

    def __init__(
        self, client: Client, subject: str, puller: Puller, queue: WorkQueue, group_slots: int, version: Callable[[], int]
    ) -> None:
        """subject: the subject of the run's idle workers. group_slots: number of free slots for
        which a worker requests a group. version: of the worker's weights."""
        self._client, self._subject, self._puller, self._queue = client, subject, puller, queue
        self._group_slots, self._version = group_slots, version
        self._subscription: Subscription | None = None

    async def run(self) -> None:
        """Check until cancelled."""
        idle, call = 0, 1  # consecutive checks without work, and the one at which to request work
        try:
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                await self._listen(bool(self._puller.ready()) or self._puller.overdue(_OVERDUE_SECONDS))
                wanted = self._wanted()
                idle = idle + 1 if wanted else 0
                if not idle:
                    call = 1
                elif idle >= call:
                    await self._announce(wanted)
                    call = idle + min(_MOST_LOOKS, 2 * call)
        finally:
            await self._listen(False)

    def _wanted(self) -> int:
        """The number of groups that were requested for free slots but did not arrive."""
        if self._puller.waiting or self._puller.paused:
            return 0
        return max(0, min(self._puller.free // self._group_slots, self._queue.outstanding))

    async def _announce(self, groups: int) -> None:
        try:
            await self._client.publish(self._subject, f"{groups} {self._version()}".encode())
        except NatsError as error:
            log.debug("idle: %r", error)

    async def _listen(self, wanted: bool) -> None:
        try:
            if wanted and self._subscription is None:
                self._subscription = await self._client.subscribe(self._subject, queue=_QUEUE_GROUP, cb=self._share)
            elif not wanted and self._subscription is not None:
                subscription, self._subscription = self._subscription, None
                await subscription.unsubscribe()
        except NatsError as error:
            log.debug("can't subscribe to idle workers: %r", error)

    async def _share(self, message: Msg) -> None:
        groups, version = map(int, message.data.split())
        given = await self._puller.share(groups, LOOK_SECONDS, version)
        if given:
            log.info("gave %d waiting groups to an idle worker", len(given))
