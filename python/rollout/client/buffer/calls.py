"""Calls that survive a restart of the buffer."""

from __future__ import annotations

import time
from typing import Any

import grpc

from rollout.client.errors import RemoteError, remote_errors

_BACKOFF_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0)


def call(method: Any, request: Any, metadata: tuple[tuple[str, str], ...], *, retry_seconds: float = 60.0) -> Any:
    """Make a unary call, and retry it for ``retry_seconds`` while the service is unavailable.
    Raises ``RemoteError``."""
    end = time.monotonic() + retry_seconds
    attempt = 0
    while True:
        try:
            with remote_errors():
                return method(request, metadata=metadata)
        except RemoteError as error:
            pause = error.retry_seconds or _BACKOFF_SECONDS[min(attempt, len(_BACKOFF_SECONDS) - 1)]
            if error.code is not grpc.StatusCode.UNAVAILABLE or time.monotonic() + pause > end:
                raise
        time.sleep(pause)
        attempt += 1
