"""The connection to the buffer service."""

from __future__ import annotations

import os
from typing import Any, Self, cast

from rollout.buffer.v1 import buffer_pb2 as pb
from rollout.buffer.v1.buffer_pb2_grpc import BufferServiceStub
from rollout.client.buffer.consumer import Consumer
from rollout.client.buffer.producer import Producer
from rollout.client.buffer.settings import Ledger
from rollout.client.connection import Server, locate
from rollout.client.errors import remote_errors


def connect(server: str | None = None, *, token: str | None = None, state: str | os.PathLike[str] | None = None) -> Buffer:
    """Connect to the buffer of ``server`` (host:port), or of the local ``rolloutd`` of a state
    folder. Use it in ``with``.

    Nothing is sent before the first call. Raises ``NoDaemon`` if no server is named and no local
    ``rolloutd`` runs.
    """
    return Buffer(locate(server, token, state))


class Buffer:
    """A connection that producers and consumers share. Calls raise ``RemoteError``, and
    ``ValueError`` after ``close``."""

    def __init__(self, server: Server) -> None:
        self._metadata = server.metadata
        self._channel = server.channel()
        self._stub = cast(Any, BufferServiceStub(self._channel))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Close its producers first."""
        self._channel.close()

    def open(self, run: str, ledger: Ledger) -> pb.LedgerState:
        """Create or reopen the ledger of a run. Other settings than before are refused, reason
        LEDGER_CONFIG_CONFLICT."""
        with remote_errors():
            request = pb.OpenLedgerRequest(run_id=run, config=ledger.message())
            return self._stub.OpenLedger(request, metadata=self._metadata).state

    def finish(self, run: str) -> None:
        """Close the ledger of a run: it takes no more samples, and its rows stay."""
        with remote_errors():
            self._stub.CloseLedger(pb.CloseLedgerRequest(run_id=run), metadata=self._metadata)

    def trim(self, run: str, step: int) -> int:
        """Allow the buffer to delete the payloads of the steps up to ``step``. Returns the number
        of bytes that were freed."""
        with remote_errors():
            request = pb.TrimPayloadsRequest(run_id=run, through_step=step)
            return self._stub.TrimPayloads(request, metadata=self._metadata).bytes

    def producer(self, run: str, *, in_flight: int = 16) -> Producer:
        """A producer for a run. in_flight: puts that may be sent and not yet durable."""
        return Producer(self._stub, self._metadata, run, in_flight=in_flight)

    def consumer(self, run: str, *, first: int = 1, steps: int = 0) -> Consumer:
        """A consumer of a run. first: first step to lease. steps: number of steps; 0: no limit."""
        return Consumer(self._stub, self._metadata, run, first=first, steps=steps)
