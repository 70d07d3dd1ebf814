"""Segment files: what a producer appends to one that it was lent, and what a consumer reads of any."""

from __future__ import annotations

import fcntl
import functools
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from rollout.buffer.v1 import buffer_pb2 as pb
from rollout.client.buffer.sample import Piece

_MOST_PIECES = 1000  # of one system call; Linux takes 1,024
_MAPPED = 1 << 20  # bytes from which a range is mapped and not read
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs", "overlay"}


@functools.cache
def boot_id() -> str:
    """Names the kernel that this process runs on since it was started; "" where the system has no such name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class LentSegment:
    """A file that the buffer has lent. ``end`` is where the next record begins. One thread at a time; ``read`` from any."""

    def __init__(self, number: int, lending: int, file: int, end: int, roll_bytes: int) -> None:
        self.number, self.lending, self.end, self.roll_bytes = number, lending, end, roll_bytes
        self._file = file
        self.unanswered = 0  # puts that name it and are not durable yet

    @classmethod
    def open(cls, lent: pb.LendSegmentResponse) -> LentSegment | None:
        """None where the file is not to be had here: the buffer is on another host, or its files are somebody else's."""
        if lent.boot_id != boot_id():
            return None
        try:
            file = os.open(lent.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        if os.fstat(file).st_ino != lent.inode:
            os.close(file)
            return None
        return cls(lent.segment, lent.lending, file, lent.offset, lent.roll_bytes)

    @property
    def full(self) -> bool:
        return self.end >= self.roll_bytes

    def append(self, data: Sequence[Piece], size: int) -> int:
        """Write ``size`` bytes and return where they begin. Raises ``OSError``; then nothing more may be appended here."""
        begin = self.end
        written = os.pwritev(self._file, data[:_MOST_PIECES], begin)
        if written < size:
            rest = memoryview(b"".join(data))
            while written < size:
                written += os.pwrite(self._file, rest[written:], begin + written)
        self.end = begin + size
        return begin

    def read(self, begin: int, size: int) -> bytes:
        data = os.pread(self._file, size, begin)
        if len(data) != size:
            raise OSError(f"segment {self.number} is {size - len(data)} bytes short")
        return data

    def close(self) -> None:
        os.close(self._file)


@functools.cache
def _local(device: int) -> bool:
    """Whether locks on files of a device hold for the buffer too: it is no network's, as ``local_linux.go`` has it."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    name = f"{os.major(device)}:{os.minor(device)}"
    kinds = [line.partition(" - ")[2].split()[0] for line in mounts if line.split()[2] == name]
    return bool(kinds) and all(kind in _LOCAL for kind in kinds)


class SegmentReader:
    """Opens segment files once each and gives ranges of them. One thread at a time.

    The buffer lends a file again once its payloads are trimmed, unless somebody shares its lock. The lock belongs to what was
    opened, of which each mapping holds a copy: it ends with the last array. What can't be locked so is copied.
    """

    def __init__(self) -> None:
        self._files: dict[str, tuple[int, bool]] = {}  # handle, and whether it may be mapped

    def read(self, path: str, begin: int, size: int) -> memoryview:
        """Bytes of a file; large ranges are mapped, and stay so as long as anybody holds a view. Raises ``OSError``."""
        held = self._files.get(path)
        if held is None:
            held = self._files[path] = _share(path)
        file, locked = held
        if size < _MAPPED or not locked:
            data = os.pread(file, size, begin)
            if len(data) != size:
                raise OSError(f"{path} ends {size - len(data)} bytes before byte {begin + size}")
            return memoryview(data)
        if os.fstat(file).st_size < begin + size:  # to touch what is mapped beyond the end would kill the process
            raise OSError(f"{path} ends before byte {begin + size}")
        start = begin - begin % mmap.ALLOCATIONGRANULARITY
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        mapped = mmap.mmap(file, begin - start + size, flags=flags, prot=mmap.PROT_READ, offset=start)
        return memoryview(mapped)[begin - start :]

    def keep(self, paths: set[str]) -> None:
        """Close the files that are not among ``paths``."""
        for path in self._files.keys() - paths:
            os.close(self._files.pop(path)[0])

    def __del__(self) -> None:
        self.keep(set())  # what is mapped stays so


def _share(path: str) -> tuple[int, bool]:
    """Open a file, and keep the buffer from lending it again; whether that holds. Raises ``OSError``."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        about = os.fstat(file)
        locked = _local(about.st_dev)
        if locked:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if not os.path.samestat(about, os.stat(path)):
                raise OSError(f"{path} was taken for another segment")
        return file, locked
    except OSError:
        os.close(file)
        raise
