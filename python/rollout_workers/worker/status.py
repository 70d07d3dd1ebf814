"""Converts exceptions to gRPC errors. An exception with a ``reason`` becomes a google.rpc.Status
with an ErrorInfo of domain ``rollout``.

Any other exception becomes INTERNAL with a fixed message; its details are only logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import Mapping, Sequence
from typing import ClassVar

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2, status_pb2

from rollout.errors import RolloutError

log = logging.getLogger(__name__)

DOMAIN = "rollout"
DETAILS_KEY = "grpc-status-details-bin"
_INTERNAL = "internal error: see the worker's log"
_FULL = "the worker's disk is full"
_FIX_FULL = "free some space on that disk; active runs continue by themselves"
_FIX_INODES = "delete files on that disk that are not needed, however small; active runs continue by themselves"

# gRPC codes of the reasons that workers return. Other reasons are FAILED_PRECONDITION: the caller
# must change something.
_CODES: Mapping[str, int] = {
    "INTERNAL": code_pb2.INTERNAL,
    "INVALID_REQUEST": code_pb2.INVALID_ARGUMENT,
    "UNAUTHENTICATED": code_pb2.UNAUTHENTICATED,
    "CONTEXT_OVERFLOW": code_pb2.INVALID_ARGUMENT,
    "INVALID_PROMPT": code_pb2.INVALID_ARGUMENT,
    "PROMPT_INVALID": code_pb2.INVALID_ARGUMENT,
    "UNSUPPORTED_BY_ENGINE": code_pb2.INVALID_ARGUMENT,
    "DUPLICATE_REQUEST": code_pb2.ALREADY_EXISTS,
    "RUN_MISMATCH": code_pb2.INVALID_ARGUMENT,
    "WEIGHTS_UNREADABLE": code_pb2.FAILED_PRECONDITION,
    "WEIGHTS_NOT_FOUND": code_pb2.NOT_FOUND,
    "WEIGHTS_SOURCES_LOST": code_pb2.UNAVAILABLE,
    "WEIGHTS_PATCH_CORRUPT": code_pb2.DATA_LOSS,
    "WEIGHTS_TRANSFER_CORRUPT": code_pb2.DATA_LOSS,
    "STATE_UNREADABLE": code_pb2.DATA_LOSS,
    "PAYLOAD_CORRUPT": code_pb2.DATA_LOSS,
    "ENGINE_FAILED": code_pb2.INTERNAL,
    "ENGINE_CLOSED": code_pb2.UNAVAILABLE,
    "ENGINE_ERROR": code_pb2.INTERNAL,
    "NON_FINITE_LOGITS": code_pb2.INTERNAL,
    "DRAINING": code_pb2.UNAVAILABLE,
    "SERVICE_UNAVAILABLE": code_pb2.UNAVAILABLE,
    "STEP_IN_PROGRESS": code_pb2.ABORTED,
    "RANK_LOST": code_pb2.UNAVAILABLE,
    "LEARNER_SUPERSEDED": code_pb2.UNAVAILABLE,  # a newer learner has replaced this one
}


class EdgeError(RolloutError):
    """An error with details for the caller: metadata, violations by field path, and the delay of a
    retry. status: the gRPC code if it differs from the usual one of ``reason``."""

    reason: ClassVar[str] = "INTERNAL"
    status: ClassVar[int | None] = None

    def __init__(
        self,
        message: str,
        *,
        fix: str = "",
        metadata: Mapping[str, str] | None = None,
        violations: Sequence[tuple[str, str]] = (),
        retry_seconds: float | None = None,
    ) -> None:
        super().__init__(message, fix=fix)
        self.metadata = dict(metadata or {})
        self.violations = tuple(violations)
        self.retry_seconds = retry_seconds


class InvalidRequest(EdgeError):
    """A request violates its contract. ``violations`` lists every violation."""

    reason = "INVALID_REQUEST"


class Unauthenticated(EdgeError):
    """The bearer token is missing or wrong."""

    reason = "UNAUTHENTICATED"


class Draining(EdgeError):
    """The worker is shutting down."""

    reason = "DRAINING"


class RunMismatch(EdgeError):
    """The request is for another run than the worker's."""

    reason = "RUN_MISMATCH"


def status_of(error: BaseException) -> status_pb2.Status:
    """The gRPC status for ``error``. Errors without a reason are logged here with their
    traceback."""
    reason = getattr(error, "reason", None)
    if isinstance(error, asyncio.CancelledError):
        return _status(code_pb2.CANCELLED, "the call was canceled", "CANCELED")
    if not isinstance(reason, str):
        log.error("a call failed: %r", error, exc_info=error)
        if _disk_full(error):
            message, fix = disk_full(error)
            return _status(code_pb2.RESOURCE_EXHAUSTED, f"{_FULL}: {message}", "DISK_FULL", {"fix": fix})
        return _status(code_pb2.INTERNAL, _INTERNAL, "INTERNAL")
    code = (error.status if isinstance(error, EdgeError) else None) or _CODES.get(reason, code_pb2.FAILED_PRECONDITION)
    status = _status(code, str(error), reason, getattr(error, "metadata", None) or {})
    violations: Sequence[tuple[str, str]] = getattr(error, "violations", ())
    if violations:
        bad = error_details_pb2.BadRequest()
        for path, description in violations:
            bad.field_violations.add(field=path, description=description)
        _attach(status, bad)
    delay = getattr(error, "retry_seconds", None)
    if delay is not None:
        _attach(status, error_details_pb2.RetryInfo(retry_delay=Duration(nanos=int(delay * 1e9) % 10**9, seconds=int(delay))))
    return status


def _disk_full(error: BaseException) -> bool:
    """Whether a write failed because the disk is full. safetensors reports that only in its
    message."""
    return (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)) or "No space left on device" in str(error)


def disk_full(error: BaseException) -> tuple[str, str]:
    """The message and the fix of a write that failed because the disk is full: of space, or of
    inodes, which many small files use up."""
    for name in (getattr(error, "filename2", None), getattr(error, "filename", None)):
        with contextlib.suppress(OSError, ValueError):
            if isinstance(name, (str, os.PathLike)):
                folder = os.path.dirname(os.path.abspath(name))
                disk = os.statvfs(folder)
                if disk.f_files and not disk.f_favail:  # Btrfs has no limit, and reports 0 of 0
                    return f"no inodes are left (`df -i {folder}`): {error}", _FIX_INODES
    return str(error), _FIX_FULL


async def abort(context: grpc.aio.ServicerContext, error: BaseException) -> None:
    """End the call with the status of ``error``."""
    status = status_of(error)
    await context.abort(_GRPC[status.code], status.message, trailing_metadata=((DETAILS_KEY, status.SerializeToString()),))


_GRPC = {code.value[0]: code for code in grpc.StatusCode}


def _status(code: int, message: str, reason: str, metadata: Mapping[str, str] | None = None) -> status_pb2.Status:
    status = status_pb2.Status(code=code, message=message)
    _attach(status, error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata or {}))
    return status


def _attach(status: status_pb2.Status, detail: object) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)  # type: ignore[arg-type]
    status.details.append(packed)
