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
    """The buffer of ``server`` (host:port), or of the local ``rolloutd`` of the state folder. Use it in ``with``.

    Nothing is sent before the first call. Raises ``NoDaemon`` where no server is named and none runs here.
    """
    return Buffer(locate(server, token, state))


class Buffer:
    """One connection; producers and consumers share it. Calls raise ``RemoteError``, and ``ValueError`` once it is closed."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.channel = server.channel()
        self._stub = cast(Any, BufferServiceStub(self.channel))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Producers should be closed before."""
        self.channel.close()

    def open(self, run: str, ledger: Ledger) -> pb.LedgerState:
        """Make or reopen the ledger of a run; another shape than before is refused, reason LEDGER_CONFIG_CONFLICT."""
        with remote_errors():
            request = pb.OpenLedgerRequest(run_id=run, config=ledger.message())
            return self._stub.OpenLedger(request, metadata=self.server.metadata).state

    def finish(self, run: str) -> None:
        """Take no more samples of the run; its ledger stays."""
        with remote_errors():
            self._stub.CloseLedger(pb.CloseLedgerRequest(run_id=run), metadata=self.server.metadata)

    def trim(self, run: str, step: int) -> int:
        """Say that the payloads of the steps through one are not needed again; bytes that this freed."""
        with remote_errors():
            request = pb.TrimPayloadsRequest(run_id=run, through_step=step)
            return self._stub.TrimPayloads(request, metadata=self.server.metadata).bytes

    def producer(self, run: str, *, in_flight: int = 16) -> Producer:
        """in_flight: puts that were sent and are not durable yet. As many more are prepared, and wait until others are."""
        server = self.server
        plain = "" if server.ca_file or server.cert_file else server.address
        return Producer(self.channel, server.metadata, run, in_flight=in_flight, address=plain)

    def consumer(self, run: str, *, first: int = 1, steps: int = 0) -> Consumer:
        """first: step to begin with. steps: how many; 0: without end."""
        return Consumer(self._stub, self.server.metadata, run, first=first, steps=steps)
