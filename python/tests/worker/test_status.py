"""The status that a caller gets for an exception."""

from __future__ import annotations

import errno

import pytest
from google.rpc import code_pb2, error_details_pb2

from rollout_workers.worker.status import status_of


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "optimizer.safetensors.tmp"), "DISK_FULL"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "DISK_FULL"),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), "DISK_FULL"),
        (OSError(errno.EIO, "Input/output error"), "INTERNAL"),
    ],
)
def test_the_error_for_a_full_disk_has_a_fix(error: Exception, reason: str) -> None:
    status, info = status_of(error), error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.reason == reason
    assert ("free some" in info.metadata["fix"]) == (reason == "DISK_FULL")
    assert status.code == (code_pb2.RESOURCE_EXHAUSTED if reason == "DISK_FULL" else code_pb2.INTERNAL)
