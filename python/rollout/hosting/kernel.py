"""What the kernel says that a process waits for, from /proc, as a sentence and its fix. Processes
of this host that wait for each other, over pipes, locks, and connections, are followed."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import socket
import stat
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_BUSY_SECONDS = 0.1
_LONGEST = 500  # characters of a text of a process
_MOST = 3  # addresses in a sentence
_MOST_POLLED = 64  # descriptors
_NAME_SERVER = ":53"  # how its address ends
_DEEPEST = 3  # processes that wait for each other
BLOCKED = "is blocked in the kernel"
"""How the text begins of a wait that no signal ends."""


def field_of(pid: int, name: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith(name + ":"))


# Numbers of system calls that block.
_CALLS: dict[str, dict[str, tuple[int, ...]]] = {
    "x86_64": {
        "read": (0, 17, 19, 295), "write": (1, 18, 20, 77, 296), "sync": (74, 75, 277), "close": (3,), "open": (2,),
        "openat": (257,), "poll": (7, 232, 271, 281), "select": (23, 270), "connect": (42,), "recv": (45, 47), "wait": (61, 247),
        "fcntl": (72,), "flock": (73,), "futex": (202,), "sleep": (35, 230),
    },
    "aarch64": {
        "read": (63, 65, 67, 69), "write": (46, 64, 66, 68, 70), "sync": (82, 83, 84), "close": (57,), "openat": (56,),
        "poll": (22, 73), "select": (72,), "connect": (203,), "recv": (207, 212), "wait": (95, 260),
        "fcntl": (25,), "flock": (32,), "futex": (98,), "sleep": (101, 115),
    },
}  # fmt: skip


def waits_for(
    pid: int, thread: int = 0, inner: Sequence[str] | None = None, calls: str = "", waiters: tuple[int, ...] = ()
) -> tuple[str, str]:
    """What the kernel says that a thread waits for, and what ends it. thread: 0 is the main thread.
    inner, calls: the library files and the function that the user's code has called; None if that
    is not known. waiters: the processes that wait for this one."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        thread = thread or pid
        state = _thread_state(pid, thread)
        if state == "T":
            return "is stopped by a signal", f"continue it: `kill -CONT {pid}`"
        if state == "t":
            return "is stopped by a debugger", f"see which process traces process {pid} (TracerPid in /proc/{pid}/status)"
        call, arguments = system_call(pid, thread)
        first = arguments[0] if arguments else 0
        known, inner = inner is not None, inner or ()
        if call == "running":
            return _computes(pid)
        if call == "flock" or call == "fcntl":
            return _file_lock(pid, first, waiters)
        if call == "wait" or any("subprocess" in name for name in inner):
            return _child(pid, waiters)
        if call == "futex":
            return next((pool for name, pool in _POOLS.items() if name in inner), ("waits for a lock or a thread", ""))
        if call == "sleep":  # a library may sleep between two tries to get a lock, as SQLite does
            return _locked_elsewhere(pid, waiters) or _descriptors(pid) or (_sleep(pid, arguments), "")
        if call == "write" and _link(pid, first).startswith("pipe:"):
            return _full_pipe(pid, first)
        if call == "read" and (known or waiters) and _link(pid, first).startswith("pipe:"):
            return _empty_pipe(pid, first, waiters)
        if call in ("open", "openat") and (waits := _opened_pipe(pid, _text_at(pid, arguments[call == "openat"]))):
            return waits
        if blocked := _file_system(pid, call, arguments, state == "D"):
            return blocked
        sockets = _sockets(pid)
        if call == "poll" and (polled := {link: sockets[link] for link in _polled(pid, arguments) if link in sockets}):
            return _silent(pid, list(polled.values()), waiters)
        if call in ("read", "recv", "connect"):
            link = _link(pid, first)
            if link in sockets:
                return _silent(pid, [sockets[link]], waiters)
            if link.startswith("/"):
                return f"reads {link}", f"see why {link} has no data"
        if call in ("poll", "select") and (not inner or any(name in _NETWORK or "http" in name for name in inner)) and sockets:
            return _silent(pid, list(sockets.values()), waiters)
        if calls == "getaddrinfo":
            return (
                "resolves a host name (getaddrinfo)",
                "see why the name does not resolve: `getent hosts NAME`, /etc/resolv.conf",
            )
        if call == "poll" and "streams.py" in inner and _children(pid):  # of asyncio
            return _child(pid, waiters)
        if call == "poll":
            return next((does for name, does in _AWAITED.items() if name in inner), ""), ""
    return "", ""


_POOLS = {
    "connection_pool.py": (
        "waits for a free connection of an HTTP connection pool (httpx)",
        "close each response (`with client.stream(..)`), or raise `httpx.Limits`; a pool timeout makes it an error",
    ),
    "connectionpool.py": (
        "waits for a free connection of an HTTP connection pool (urllib3)",
        "close each response, or raise `maxsize` of the pool; a pool timeout makes it an error",
    ),
}
"""Library files in which a thread waits for a connection that other code of the process has."""
_AWAITED = {"locks.py": "awaits a lock", "queues.py": "awaits an item of a queue", "tasks.py": "awaits a task or a timer"}


_NETWORK = {
    "socket.py",
    "ssl.py",
    "streams.py",
    "selector_events.py",
    "base_events.py",
    "connection.py",
    "connector.py",
    "client.py",
}


def system_call(pid: int, thread: int) -> tuple[str, list[int]]:
    """The system call in which a thread is, and its arguments; ``running`` if it is in none, and
    empty if that is not known."""
    fields = Path(f"/proc/{pid}/task/{thread}/syscall").read_text().split()
    if fields[0] == "running":
        return "running", []
    calls = _CALLS.get(platform.machine(), {})
    name = next((name for name, numbers in calls.items() if int(fields[0]) in numbers), "")
    return name, [int(field, 16) for field in fields[1:7]]


def _thread_state(pid: int, thread: int) -> str:
    """The letter of proc(5): D if it is in the kernel and no signal ends that."""
    return Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(") ")[2][0]


def _file_system(pid: int, call: str, arguments: list[int], whole: bool) -> tuple[str, str] | None:
    """The file that a call waits for, and its mount; None if that is not why it waits. whole: no
    signal ends the call."""
    if call in ("open", "openat"):
        path = _text_at(pid, arguments[call == "openat"])
    elif call in ("read", "write", "sync", "close"):
        path = _link(pid, arguments[0])
    else:
        return None
    if not path.startswith("/") or path.startswith("/dev/") or (call in ("open", "openat", "read") and _is_pipe(pid, path)):
        return None
    mount, kind = mount_of(pid, path)
    if kind.startswith("fuse") and (server := _fuse_server(mount)):
        does, fix = _does(server, (pid,))
        return (
            f"{BLOCKED if whole else 'waits in the kernel'}: the {call.removesuffix('at')} of {path} waits for process {server} "
            f"(`{_command(server)}`), which serves the file system at {mount} ({kind})" + (f" and {does}" if does else ""),
            fix or f"see why process {server} does not answer; `fusermount -uz {mount}` ends its calls with an error",
        )
    return (
        f"{BLOCKED if whole else 'waits in the kernel'}: the {call.removesuffix('at')} of {path} waits for the file system at "
        f"{mount} ({kind})",
        f"see why {mount} does not answer: it is frozen (`fsfreeze -u {mount}`), its server is gone, or its disk fails (`dmesg`)",
    )


def _is_pipe(pid: int, path: str) -> bool:
    """Whether a path is a named pipe, which waits for its other end. It does not ask a file system
    that does not answer: those of the network have no pipes."""
    with contextlib.suppress(OSError):  # it is being made
        return mount_of(pid, path)[1] in LOCAL and stat.S_ISFIFO(os.stat(f"/proc/{pid}/root{path}").st_mode)
    return False


LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "overlay", "tmpfs", "zfs"}


def _full_pipe(pid: int, number: int) -> tuple[str, str]:
    """Who has the other end of a pipe that a process can't write to."""
    link = _link(pid, number)
    name = {1: "its output", 2: "its error output"}.get(number, "a pipe")
    readers = _with_link(link, os.O_RDONLY)
    named = " and ".join(f"process {reader} (`{_command(reader)}`)" for reader in readers[:_MOST]) or "nobody"
    return (
        f"is blocked in a write to {name}, a full pipe that {named} should read",
        "read the pipe while the process runs: `communicate()` does, `wait()` does not; or send the output to a file",
    )


def _empty_pipe(pid: int, number: int, waiters: tuple[int, ...]) -> tuple[str, str]:
    """Who has the other end of a pipe that a process reads, and what that one waits for."""
    writers = _with_link(_link(pid, number), os.O_WRONLY)
    others = [writer for writer in writers if writer != pid]
    what = "its input, a pipe" if number == 0 else "a pipe"
    if not others:
        if not writers:
            return "", ""  # it is at its end
        return f"reads {what} that only it has open for writing", "close its end for writing: the read ends then"
    if waiting := [writer for writer in others if writer in waiters]:  # in a circle
        return (
            f"reads {what} that process {waiting[0]}, which waits, has open for writing",
            "close the pipe (`stdin.close()`) before the output is read, or use `communicate()`",
        )
    does, fix = waits_for(others[0], waiters=(*waiters, pid)) if len(waiters) < _MOST else ("", "")
    first, *more = [f"process {writer} (`{_command(writer)}`)" for writer in others[:_MOST]]
    also = f" (as {' and '.join(more)} {'have' if len(more) > 1 else 'has'})" if more else ""
    return (
        f"reads {what} that {first} has open for writing{also}" + (f", which {does}" if does else ""),
        fix or f"see why process {others[0]} writes nothing; `kill {others[0]}` ends it",
    )


def _with_link(link: str, access: int | None = None) -> list[int]:
    """The processes that have a descriptor with this link. access: as in open(2); None: any."""
    found: list[int] = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError, StopIteration, ValueError):
            if process.name.isdecimal() and any(_has(process, file, link, access) for file in (process / "fd").iterdir()):
                found.append(int(process.name))
    return sorted(found)


def _has(process: Path, file: Path, link: str, access: int | None) -> bool:
    if os.readlink(file) != link:
        return False
    if access is None:
        return True
    info = (process / "fdinfo" / file.name).read_text()
    flags = next(line.split()[1] for line in info.splitlines() if line.startswith("flags:"))
    return int(flags, 8) & os.O_ACCMODE == access


def _text_at(pid: int, address: int) -> str:
    """The text at an address of a process."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(min(_LONGEST, 4096 - address % 4096)).partition(b"\0")[0].decode(errors="replace")
    return ""


def mount_of(pid: int, path: str) -> tuple[str, str]:
    """The mount point of a file, and its file system."""
    best = ("/", "?")
    for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
        fields = line.split()
        point = fields[4].replace("\\040", " ")
        if len(point) >= len(best[0]) and (path == point or path.startswith(point.rstrip("/") + "/")):
            best = (point, fields[fields.index("-") + 1])
    return best


def _computes(pid: int) -> tuple[str, str]:
    began, before = time.monotonic(), _cpu_seconds(pid)
    time.sleep(_BUSY_SECONDS)
    share = (_cpu_seconds(pid) - before) / (time.monotonic() - began)
    return f"computes, with {min(100, 100 * share):.0f} % of a core", ""


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(fields[0]) / 1e9


def _children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


def _child(pid: int, waiters: tuple[int, ...]) -> tuple[str, str]:
    """The newest process that a process has started, and what that waits for."""
    children = _children(pid)
    if not children:
        return "waits for a process to end", ""
    child = children[-1]
    does, fix = waits_for(child, waiters=(*waiters, pid)) if len(waiters) < _DEEPEST else ("", "")
    waits = f"waits for process {child} (`{_command(child)}`)" + (f", which {does}" if fix else "")
    return waits, fix or f"see why process {child} does not end; `kill {child}` ends it"


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split()
        text = " ".join(words)  # one line, also of `python -c` with a program
        return text[:77] + "..." if len(text) > 80 else text
    return "?"


def _link(pid: int, number: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/fd/{number}")
    return ""


def _file_lock(pid: int, number: int, waiters: tuple[int, ...]) -> tuple[str, str]:
    """The file of a lock, and the processes that hold it."""
    path = _link(pid, number)
    inode = _inode(pid, number)
    for lock in _locks():
        if lock.inode == inode and (named := _holders(lock, path, (*waiters, pid))):
            holders, fix = named
            return f"waits for the lock of {path}, which {holders}", fix
    return f"waits for the lock of {path}", "see which process holds the lock: `cat /proc/locks`"


def _locked_elsewhere(pid: int, waiters: tuple[int, ...]) -> tuple[str, str] | None:
    """A file that this process has open, and whose lock for writing another process holds."""
    opened: dict[int, str] = {}
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if (path := os.readlink(file)).startswith("/") and not path.startswith(("/dev/", "/proc/", "/memfd:")):
                opened[_inode(pid, int(file.name))] = path
    for lock in _locks():
        if (
            lock.writes
            and lock.pid != pid
            and lock.inode in opened
            and not (lock.described and _shares(Path(f"/proc/{pid}"), lock.inode))  # it has inherited the lock
            and (named := _holders(lock, opened[lock.inode], (*waiters, pid)))
        ):
            holders, fix = named
            return f"sleeps, and has {opened[lock.inode]} open, whose lock {holders}", fix
    return None


def _inode(pid: int, number: int) -> int:
    """The inode of an open file; 0 if it is not known. It does not ask a file system that may not
    answer."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        info = Path(f"/proc/{pid}/fdinfo/{number}").read_text().splitlines()
        if (line := next((line for line in info if line.startswith("ino:")), None)) is not None:
            return int(line.split()[1])
        if (path := _link(pid, number)).startswith("/") and mount_of(pid, path)[1] in LOCAL:  # before Linux 5.14
            return os.stat(f"/proc/{pid}/fd/{number}").st_ino
    return 0


class _Lock(NamedTuple):
    """A lock of a file that a process holds. described: it belongs to an open file description,
    which processes inherit, and not to one process."""

    inode: int
    pid: int
    writes: bool
    described: bool


def _locks() -> Iterator[_Lock]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if "->" not in fields and len(fields) > 5:
                yield _Lock(int(fields[5].rpartition(":")[2]), int(fields[4]), fields[3] == "WRITE", fields[1] != "POSIX")


def _holders(lock: _Lock, path: str, waiters: tuple[int, ...]) -> tuple[str, str] | None:
    """Who holds a lock, what that one waits for, and what ends that; None if its process is in
    another namespace."""
    pids = ([lock.pid] if lock.pid > 0 and Path(f"/proc/{lock.pid}").exists() else []) if not lock.described else _sharing(lock)
    if not pids:
        return None
    named = [f"process {pid} (`{_command(pid)}`)" for pid in pids[:_MOST]]
    if len(pids) == 1:
        does, fix = _does(pids[0], waiters)
        if fix:
            return f"{named[0]} holds, and which {does}", fix
        return f"{named[0]} holds", f"see why process {pids[0]} holds the lock of {path}; the lock ends with it"
    numbers = " ".join(map(str, pids))
    return (
        f"{' and '.join(named)} hold",
        f"see why processes {numbers} hold the lock of {path}; the lock ends when all of them have ended",
    )


def _sharing(lock: _Lock) -> list[int]:
    """The processes that have the open file description of a lock: who locked it may have ended."""
    found: list[int] = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and _shares(process, lock.inode):
            found.append(int(process.name))
    return sorted(found)


def _shares(process: Path, inode: int) -> bool:
    with contextlib.suppress(OSError):
        for file in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                if _inode(int(process.name), int(file.name)) == inode:
                    info = (process / "fdinfo" / file.name).read_text()
                    if any(line.startswith("lock:") and "POSIX" not in line for line in info.splitlines()):
                        return True
    return False


def _polled(pid: int, arguments: list[int]) -> list[str]:
    """The links of the descriptors of a poll; empty for an epoll, whose first argument is no
    address."""
    with contextlib.suppress(OSError, OverflowError), open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(arguments[0])
        entries = memory.read(8 * min(arguments[1], _MOST_POLLED))
        return [_link(pid, int.from_bytes(entries[i : i + 4], sys.byteorder)) for i in range(0, len(entries), 8)]
    return []


class _Connection(NamedTuple):
    """An open connection. local, remote: addresses. connecting: it is not connected yet."""

    local: str
    remote: str
    connecting: bool


def _sockets(pid: int) -> dict[str, _Connection]:
    """The connections that a process has opened, by the link of the descriptor. Of UDP it has those
    to name servers."""
    links = {_link(pid, int(file.name)) for file in Path(f"/proc/{pid}/fd").iterdir()}
    found: dict[str, _Connection] = {}
    served: set[str] = set()  # ports on which it listens: it has accepted the connections to them
    for table, each in _connections(pid):
        if each.link not in links:
            continue
        if each.state == _LISTENS:
            served.add(_port(each.local))
        elif each.state in (_CONNECTED, _CONNECTING) and (table.startswith("tcp") or each.remote.endswith(_NAME_SERVER)):
            found[each.link] = _Connection(each.local, each.remote, table.startswith("tcp") and each.state == _CONNECTING)
    return {link: each for link, each in found.items() if _port(each.local) not in served}


_CONNECTED, _CONNECTING, _LISTENS = "01", "02", "0A"


class _Entry(NamedTuple):
    """A line of /proc/net/tcp."""

    local: str
    remote: str
    state: str
    link: str


def _connections(pid: int) -> Iterator[tuple[str, _Entry]]:
    """The connections in the network namespace of a process, with the table that has them."""
    for table in ("tcp", "tcp6", "udp", "udp6"):
        with contextlib.suppress(OSError):
            for line in itertools.islice(Path(f"/proc/{pid}/net/{table}").read_text().splitlines(), 1, None):
                fields = line.split()
                yield table, _Entry(_address(fields[1]), _address(fields[2]), fields[3], f"socket:[{fields[9]}]")


def _port(address: str) -> str:
    return address.rpartition(":")[2]


def _peer(pid: int, connection: _Connection) -> int:
    """The process of this host at the other end of a connection: that has it, or listens for it. 0
    without one."""
    entries = [entry for table, entry in _connections(pid) if table.startswith("tcp")]
    own = {connection.local, _mapped(connection.local)}
    far = {connection.remote, _mapped(connection.remote)}
    links = [e.link for e in entries if e.local in far and e.remote in own]
    if links or connection.remote.startswith(("127.", "[::1]")):
        anywhere = {f"{host}:{_port(connection.remote)}" for host in ("0.0.0.0", "[::]")}
        links += [e.link for e in entries if e.state == _LISTENS and e.local in far | anywhere]
    for link in links:
        if (owners := _with_link(link)) and owners[0] != pid:
            return owners[0]
    return 0


def _mapped(address: str) -> str:
    """An IPv4 address as an IPv6 socket has it."""
    return f"[::ffff:{address.rpartition(':')[0]}]:{_port(address)}"


def _address(text: str) -> str:
    """The address of a line of /proc/net/tcp."""
    host, _, port = text.partition(":")
    words = b"".join(int(host[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(host), 8))
    name = socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words)
    return f"{name}:{int(port, 16)}" if len(words) == 4 else f"[{name}]:{int(port, 16)}"


def _silent(pid: int, connections: list[_Connection], waiters: tuple[int, ...]) -> tuple[str, str]:
    addresses = [each.remote for each in connections]
    servers = sorted({address for address in addresses if address.endswith(_NAME_SERVER)})[:_MOST]
    if servers:  # a request follows the resolution of its host
        named = ", ".join(servers)
        return (
            f"resolves a host name, and waits for the name server {named}",
            f"see why the name server {named} does not answer; /etc/resolv.conf names it",
        )
    named = ", ".join(sorted(set(addresses))[:_MOST])
    awaited, fails = (
        ("a connection to", "accepts no connection") if connections[0].connecting else ("an answer of", "does not answer")
    )
    waits, fix = f"waits for {awaited} {named}", f"see why {named} {fails}; restart it, or give the request a timeout"
    peer = _peer(pid, connections[0]) if len(set(addresses)) == 1 else 0
    if not peer:
        return waits, fix
    if Path(f"/proc/{peer}/comm").read_text().strip() == _CONTROL_PLANE:
        return (
            f"{waits}, an endpoint of the control plane (process {peer})",
            "see what else the run waits for: a request to its own endpoint may wait for the step that waits for this call; "
            "give the request a timeout",
        )
    if peer in waiters:
        return f"{waits}, where process {peer} (`{_command(peer)}`) listens, which waits for this one", fix
    does, deeper = _does(peer, (*waiters, pid))
    return (
        f"{waits}, where process {peer} (`{_command(peer)}`) listens" + (f", which {does}" if does else ""),
        deeper or f"see why process {peer} {fails}, or give the request a timeout",
    )


_CONTROL_PLANE = "rolloutd"


def _does(pid: int, waiters: tuple[int, ...]) -> tuple[str, str]:
    """What a process does that others wait for, and what ends that; empty if nothing is known. Of
    several threads it is one that waits for something."""
    if len(waiters) >= _DEEPEST:
        return "", ""
    with contextlib.suppress(OSError):
        threads = sorted(int(task.name) for task in Path(f"/proc/{pid}/task").iterdir())
        for thread in threads[:_MOST_THREADS]:
            if system_call(pid, thread)[0] == "running" and _thread_state(pid, thread) not in ("T", "t"):
                continue
            does, fix = waits_for(pid, thread, (), waiters=waiters)
            if fix and not does.startswith(_READS):  # a process may wait for commands in a pipe
                return does, fix
    return "", ""


_READS = "reads "
_MOST_THREADS = 64


def _opened_pipe(pid: int, path: str) -> tuple[str, str] | None:
    """A named pipe that a process opens, which waits for its other end."""
    if not path.startswith("/") or not _is_pipe(pid, path):
        return None
    return (
        f"opens {path}, a named pipe that no process has open at its other end",
        f"start what should read or write {path}, or correct the path",
    )


def _fuse_server(mount: str) -> int:
    """The process that serves a file system: of those with /dev/fuse the one whose command has the
    mount point, or the only one. 0 if it is not known."""
    servers = _with_link("/dev/fuse")
    named = [server for server in servers if mount in Path(f"/proc/{server}/cmdline").read_text(errors="replace").split("\0")]
    found = named or servers
    return found[0] if len(found) == 1 else 0


def _descriptors(pid: int) -> tuple[str, str] | None:
    """That a process has all descriptors open that it may have."""
    fields = next(
        line.split() for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if line.startswith("Max open files")
    )
    links = Counter(_link(pid, int(file.name)) for file in Path(f"/proc/{pid}/fd").iterdir())
    if not fields[3].isdecimal() or links.total() < int(fields[3]):
        return None
    link, count = links.most_common(1)[0]
    most = f", {count} of them of {link}" if count > 1 else ""
    return (
        f"sleeps, and has {links.total()} files open{most}: the limit is {fields[3]}, so it can open no other",
        "close each file (`with open(..)`), or raise the limit (`ulimit -n`)",
    )


def _sleep(pid: int, arguments: list[int]) -> str:
    """How long a process sleeps."""
    with contextlib.suppress(OSError, OverflowError, IndexError), open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        with_clock = arguments[0] < _CLOCKS  # clock_nanosleep(clock, flags, time); nanosleep(time) has an address there
        memory.seek(arguments[2] if with_clock else arguments[0])
        data = memory.read(16)
        seconds = int.from_bytes(data[:8], sys.byteorder) + int.from_bytes(data[8:], sys.byteorder) / 1e9
        if with_clock and arguments[1] & 1:  # TIMER_ABSTIME
            left = seconds - (time.monotonic() if arguments[0] == 1 else time.time())
            return f"sleeps for another {left:.0f} s" if left >= 1 else "sleeps"
        return f"sleeps for {seconds:.0f} s" if seconds >= 1 else "sleeps"
    return "sleeps"


_CLOCKS = 16


def ticks(process: str) -> int:
    """The start of a process or of a thread, in clock ticks since the machine's start."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()[19])


def began(pid: int) -> float:
    """When a process began, in seconds since 1970."""
    up = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - up + ticks(str(pid)) / os.sysconf("SC_CLK_TCK")
