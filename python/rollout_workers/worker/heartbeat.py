"""A thread that extends the ack deadline of work items while the worker computes.

The thread has its own event loop and NATS connection, so neither a long forward pass nor a busy
main loop delays it. Once a second it sends a progress ack for each unfinished work item. It also
publishes events.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from nats.aio.client import Client

from rollout.run.v1.run_pb2 import NatsAccess
from rollout_workers.worker.bus import connect
from rollout_workers.worker.credential import Token

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
_CANCEL_AGAIN_SECONDS = 0.1
_PROGRESS = b"+WPI"


class Heartbeat:
    """A thread with an event loop and a NATS connection. ``hold`` and ``release`` may be called
    from any thread."""

    def __init__(
        self,
        url: str,
        token: Token,
        *,
        name: str,
        run: str = "",
        access: NatsAccess | None = None,
        leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        """run: the run whose inboxes the connection uses. access: credentials other than the token,
        and TLS. leaving: whether the worker is shutting down; a lost connection is then not
        logged."""
        self._url, self._token, self._name, self._access, self._leaving = url, token, name, access, leaving
        self._of_run = run
        self._unfinished: dict[str, None] = {}  # an ordered set of reply subjects; its operations are atomic
        self._loop = asyncio.new_event_loop()
        self._client: asyncio.Future[Client] | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread; the connection is made in the background."""
        self._thread.start()
        self._ready.wait()

    def hold(self, reply: str) -> None:
        """Start to send a progress ack each second for the message with this reply subject."""
        self._unfinished[reply] = None

    def release(self, reply: str) -> None:
        """Stop sending progress acks for the message."""
        self._unfinished.pop(reply, None)

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine on this thread's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def client(self) -> Client:
        """The connection, once it is established. Call it on this thread's loop."""
        assert self._client is not None
        return await asyncio.shield(self._client)

    def stop(self) -> None:
        """Close the connection and end the thread. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(5)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        self._stopping = asyncio.Event()
        connecting = asyncio.create_task(
            connect(
                self._url,
                self._token,
                name=f"{self._name} heartbeat",
                access=self._access,
                run=self._of_run,
                leaving=self._leaving,
            )
        )
        self._client = asyncio.ensure_future(connecting)
        self._ready.set()
        beating = asyncio.create_task(self._beat())
        await self._stopping.wait()
        beating.cancel()
        if connecting.done() and not connecting.cancelled():
            with contextlib.suppress(Exception):
                async with asyncio.timeout(2):
                    await connecting.result().close()
        while rest := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in rest:  # repeated, because `wait_for` in nats-py can swallow a cancellation on Python 3.11
                task.cancel()
            await asyncio.wait(rest, timeout=_CANCEL_AGAIN_SECONDS)

    async def _beat(self) -> None:
        client = await self.client()
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            for reply in list(self._unfinished):
                try:
                    await client.publish(reply, _PROGRESS)
                except Exception as error:  # reconnecting; retried a second later
                    log.debug("can't send a progress ack: %r", error)
                    break
