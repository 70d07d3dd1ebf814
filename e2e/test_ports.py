"""Ports of servers under test are unique across tests in both languages."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import servers
from mesh import ROOT

HOLDING = """
import sys, itertools, servers
print(*itertools.islice(servers.free_ports(), 200), flush=True)
sys.stdin.read()
"""


def locks() -> Path:
    return Path(os.environ.get("TMPDIR") or "/tmp", f"rollout-ports-{os.getuid()}")


def test_processes_never_share_a_port() -> None:
    """Ports are unique although no server listens on them."""
    held: list[str] = []
    command = [sys.executable, "-c", HOLDING]
    pipes = [subprocess.Popen(command, cwd=Path(servers.__file__).parent, stdin=-1, stdout=-1, text=True) for _ in range(3)]
    try:
        for process in pipes:
            assert process.stdout is not None
            held += process.stdout.readline().split()
    finally:
        for process in pipes:
            process.communicate()
    assert len(held) == len(set(held)) == 600


def test_ports_are_locked_like_in_libs_freeport(monkeypatch: pytest.MonkeyPatch) -> None:
    go = (ROOT / "libs" / "freeport" / "freeport.go").read_text()
    assert re.search(rf"first, count = {servers.FIRST_PORT}, {servers.PORTS}\b", go)
    assert '"rollout-ports-%d", os.Getuid()' in go
    [port] = islice(servers.free_ports(), 1)
    with (locks() / str(port)).open("r+") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    monkeypatch.setattr(servers, "FIRST_PORT", port)
    monkeypatch.setattr(servers, "PORTS", 2)
    assert list(islice(servers.free_ports(), 1)) == [port + 1]  # the other of the two ports
