"""Starts a program in a network namespace, as another user, or tied to its parent's lifetime,
without `preexec_fn`.

A `preexec_fn` needs fork(), after which gRPC restarts its threads in the child. If the child's
descriptors are then closed before its program starts, such a thread aborts the child. Without
`preexec_fn` the child starts with vfork(), and this file does the work afterwards as a separate
program.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import pwd
import signal
import sys

_NEW_NETWORK = 0x40000000
_SET_PARENT_DEATH_SIGNAL = 1


def become(command: list[str], *, namespace: str | None = None, user: str | None = None, tied: bool = False) -> list[str]:
    """The command line that runs `command` in a network namespace, as a user, or `tied`: killed
    when its parent ends."""
    options = [
        *(["--namespace", namespace] if namespace else []),
        *(["--user", user] if user else []),
        *(["--tied"] if tied else []),
    ]
    return [sys.executable, "-I", "-S", __file__, *options, "--", *command] if options else command


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--namespace")
    parser.add_argument("--user")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    if options.namespace:
        _enter(options.namespace)
    if options.user:
        account = pwd.getpwnam(options.user)
        os.setgroups([])
        os.setgid(account.pw_gid)
        os.setuid(account.pw_uid)
    if options.tied:  # after the change of the user, which clears it
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    os.execvp(options.command[0], options.command)


def _enter(namespace: str) -> None:
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), f"enter {namespace}")
    os.close(descriptor)


if __name__ == "__main__":
    main()
