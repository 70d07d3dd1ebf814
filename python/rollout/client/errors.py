"""Errors of the control plane."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # pyright: ignore[reportMissingTypeStubs]

from rollout.errors import RolloutError
from rollout.plan.v1.plan_pb2 import Problem

_DETAILS = "grpc-status-details-bin"
_DOMAIN = "rollout"


class RemoteError(RolloutError):
    """An error that a gRPC call returned.

    code: the gRPC code. reason: machine-readable, ``""`` if the server sent none. metadata: further
    facts. violations: pairs of a field and its problem. retry_seconds: when the same call may
    succeed; None: unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        violations: Sequence[tuple[str, str]] = (),
        retry_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason  # type: ignore[misc] (set per instance, from the server)
        self.metadata = dict(metadata or {})
        self.violations = tuple(violations)
        self.retry_seconds = retry_seconds


class PlanRefused(RolloutError):
    """A config that cannot be planned. problems: all of its problems."""

    reason: ClassVar[str] = "PLAN_REFUSED"

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(_line(problem) for problem in self.problems))


def _line(problem: Problem) -> str:
    place = ":".join(str(part) for part in (problem.file, problem.line, problem.column) if part)
    return f"{place}: {problem.message}" + (f"; {problem.fix}" if problem.fix else "")


@contextmanager
def remote_errors() -> Generator[None, None, None]:
    """Raise gRPC errors as :class:`RemoteError`."""
    try:
        yield
    except grpc.RpcError as error:
        raise remote_error(error) from error


def remote_error(error: Any) -> RemoteError:
    """The RemoteError of a gRPC error of the blocking or the asyncio API."""
    code: grpc.StatusCode = error.code()
    message = str(error.details() or code.name)
    packed = next((value for key, value in error.trailing_metadata() or () if key == _DETAILS), None)
    reason, metadata = "", dict[str, str]()
    violations: list[tuple[str, str]] = []
    delay: float | None = None
    for detail in _details(packed):
        info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(info) and info.domain == _DOMAIN:
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(bad):
            violations.extend((violation.field, violation.description) for violation in bad.field_violations)
        elif detail.Unpack(retry):
            delay = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    return RemoteError(message, code=code, reason=reason, metadata=metadata, violations=violations, retry_seconds=delay)


def _details(packed: bytes | None) -> Sequence[Any]:
    try:
        return status_pb2.Status.FromString(packed).details if packed else ()
    except DecodeError:
        return ()
