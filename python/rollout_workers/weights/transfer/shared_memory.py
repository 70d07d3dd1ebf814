"""A folder in shared memory for the weights of a run.

The weights of a step live for two steps and need not be durable, because snapshots are. Writing 3
MB took 8 ms of a step on disk, and 1 ms in shared memory.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)
SHARED_MEMORY = Path("/dev/shm")
_VERSIONS = 4  # must fit: two published, one being written, one spare


class SharedMemory:
    """A folder in memory that belongs to one run and one process, until ``close``.

    If the process dies, its weights stay until the run has newer ones. The run's next ``close`` or
    another run's start removes them.
    """

    def __init__(self, run: str, memory: Path = SHARED_MEMORY) -> None:
        """Create ``<memory>/rollout-<user>/<run>-*``; ``folder`` is None if that is not
        possible."""
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
        except OSError as error:  # as on macOS, which has no such folder
            log.info("no shared memory (%s); weights are written to the run's folder", error)

    def fits(self, size: int) -> bool:
        """Whether there is room for all versions of ``size`` bytes each."""
        return self.folder is not None and shutil.disk_usage(self.folder).free >= _VERSIONS * size

    def close(self) -> None:
        """Remove the folder."""
        if self.folder is not None:
            root = self.folder.parent
            shutil.rmtree(self.folder, ignore_errors=True)
            self._release()
            with _alone(root):
                _sweep(root)

    def leave(self) -> None:
        """Release the folder without removing it, so that its weights can still be read."""
        if self.folder is not None:
            self._release()

    def _release(self) -> None:
        os.close(self._lock)
        self.folder = None


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Hold the lock for creating and removing folders, so that a new folder that is not locked yet
    is not removed."""
    lock = os.open(root / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _sweep(root: Path, keep: str = "") -> None:
    """Remove the folders of dead processes, which hold no lock, except those of the run
    ``keep``."""
    for folder in root.glob("*-*"):
        if keep and folder.name.startswith(f"{keep}-"):
            continue
        try:
            lock = os.open(folder / ".lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # not one of these folders
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass  # in use
        finally:
            os.close(lock)
