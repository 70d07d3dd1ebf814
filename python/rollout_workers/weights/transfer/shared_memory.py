"""Where weights are put for the workers of this host: shared memory where there is enough of it, else the run's folder.

A step's weights live for two steps, and nobody misses them after a power cut: a snapshot brings them back. Written to a disk,
3 MB took 8 ms of a step here, in shared memory 1 ms.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_VERSIONS = 4  # as many must fit: two that stay, one being written, one to spare


class SharedMemory:
    """A folder in memory that belongs to one run and one process. It is there until ``close``. Where the process dies, its
    weights serve until the run has newer ones; what is left is removed by the run's next ``close`` or another run's start."""

    def __init__(self, run: str, memory: Path = SHARED_MEMORY) -> None:
        """Claim ``<memory>/rollout-<user>/<run>-*``; without such memory ``folder`` is None."""
        self.folder: Path | None = None
        self._lock = -1
        root = memory / f"rollout-{os.getuid()}"
        try:
            root.mkdir(mode=0o700, exist_ok=True)
            if root.stat().st_uid != os.getuid():
                return
            with _alone(root):
                _sweep(root, keep=run)
                folder = Path(tempfile.mkdtemp(prefix=f"{run}-", dir=root))
                self._lock = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            self.folder = folder
        except OSError:
            return

    def fits(self, size: int) -> bool:
        """Whether there is room for weights of ``size`` bytes, again and again."""
        return self.folder is not None and shutil.disk_usage(self.folder).free >= _VERSIONS * size

    def close(self) -> None:
        """Remove the folder. What must stay was moved out before."""
        if self.folder is not None:
            root = self.folder.parent
            shutil.rmtree(self.folder, ignore_errors=True)
            self._release()
            with _alone(root):
                _sweep(root)

    def leave(self) -> None:
        """Let go of the folder, as a process does that dies: what it holds serves on, until it is swept."""
        if self.folder is not None:
            self._release()

    def _release(self) -> None:
        os.close(self._lock)
        self.folder = None


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """One process at a time makes or removes folders: else one that was just made, and is not locked yet, would be swept."""
    lock = os.open(root / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _sweep(root: Path, keep: str = "") -> None:
    """Remove the folders of processes that are no more (nobody holds their lock), but none of the run ``keep``."""
    for folder in root.glob("*-*"):
        if keep and folder.name.startswith(f"{keep}-"):
            continue
        try:
            lock = os.open(folder / ".lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # none of ours
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass  # in use
        finally:
            os.close(lock)
