"""Takes the network from this process and those that it starts."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

_NEWUSER, _NEWNET = 0x10000000, 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def cut_off_network() -> str:
    """Move this process, which must have one thread, to a network namespace that has only a
    loopback interface. Returns why that is not possible; empty if it was done."""
    if sys.platform != "linux":
        return "this system has no network namespaces"
    if not (trial := os.fork()):  # some systems allow a namespace, but nothing in it
        try:
            _enter()
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    if code := os.waitstatus_to_exitcode(os.waitpid(trial, 0)[1]):
        return f"a network namespace can't be made: {os.strerror(code) if code > 0 else f'signal {-code}'}"
    _enter()
    return ""


def _enter() -> None:
    """Raises ``OSError``."""
    uid, gid = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEWNET if uid == 0 else _NEWNET | _NEWUSER):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if uid:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _loopback_up()


def _loopback_up() -> None:
    """Programs that connect to themselves need it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(control, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))
