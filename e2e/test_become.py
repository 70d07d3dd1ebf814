"""Starting programs in namespaces, as other users, and tied to their parents."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import become
import pytest

PARENT = """
import subprocess, sys
from become import become
child = subprocess.Popen(become(["sh", "-c", "echo $$; exec sleep 60"], tied=True))
sys.stdin.read()
"""


def test_a_tied_process_ends_with_its_parent() -> None:
    command = [sys.executable, "-c", PARENT]
    parent = subprocess.Popen(command, cwd=Path(become.__file__).parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    ended, _, _ = select.select([child], [], [], 20)
    os.close(child)
    assert ended


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_starts_a_program_as_another_user() -> None:
    account = "nobody"
    outcome = subprocess.run(become.become(["id", "-un"], user=account), capture_output=True, text=True)
    assert outcome.stdout == f"{account}\n", outcome.stderr
