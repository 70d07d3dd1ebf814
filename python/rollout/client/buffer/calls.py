"""Calls that outlive a restart of the buffer."""

from __future__ import annotations

import time
from typing import Any

import grpc

from rollout.client.errors import RemoteError, remote_errors

_PAUSES = (0.05, 0.1, 0.2, 0.5, 1.0)


def call(method: Any, request: Any, metadata: tuple[tuple[str, str], ...], *, patience_seconds: float = 60.0) -> Any:
    """A unary call; while the service is away, or asks for another try, it is tried again. Raises ``RemoteError``."""
    end = time.monotonic() + patience_seconds
    attempt = 0
    while True:
        try:
            with remote_errors():
                return method(request, metadata=metadata)
        except RemoteError as error:
            pause = error.retry_seconds or _PAUSES[min(attempt, len(_PAUSES) - 1)]
            if error.code is not grpc.StatusCode.UNAVAILABLE or time.monotonic() + pause > end:
                raise
        time.sleep(pause)
        attempt += 1
