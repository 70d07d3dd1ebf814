"""The status that a caller gets for an exception."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

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


@pytest.mark.parametrize(("files", "free", "inodes"), [(1000, 0, True), (1000, 1, False), (0, 0, False)])
@pytest.mark.parametrize("copy", [False, True])
def test_a_disk_without_inodes_is_told_from_one_without_space(
    files: int, free: int, inodes: bool, copy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = SimpleNamespace(f_files=files, f_favail=free)
    monkeypatch.setattr(os, "statvfs", lambda path: full if path == "/state/weights" else SimpleNamespace(f_files=9, f_favail=9))
    names = ("/dev/shm/v74", None, "/state/weights/v74") if copy else ("/state/weights/v74",)
    error = OSError(errno.ENOSPC, "No space left on device", *names)
    status, info = status_of(error), error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.reason == "DISK_FULL"
    assert ("no inodes are left (`df -i /state/weights`)" in status.message) == inodes, status.message
    assert ("delete files" in info.metadata["fix"], "free some space" in info.metadata["fix"]) == (inodes, not inodes)
