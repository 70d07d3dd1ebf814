"""How a process of plugins ends with the worker that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def end_with_parent() -> None:
    """Let the kernel end this process when the thread that started it has ended.

    A process also notices that its pipe or socket has closed, but not while the user's code holds
    the interpreter in a loop. Linux only; elsewhere such a process outlives its worker.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os._exit(0)
