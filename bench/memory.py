"""The peak memory of the child processes of a process, sampled in the background."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

EVERY_SECONDS = 0.5


class Peaks:
    """The peak resident memory of each process below ``root``. Linux only; shared pages count in
    each process that uses them."""

    def __init__(self, root: int) -> None:
        self._root, self._held = root, dict[int, int]()

    @property
    def megabytes(self) -> float:
        """The sum of the peaks of all processes. It is at least the largest total at any moment."""
        return sum(self._held.values()) / 1024

    def look(self) -> None:
        """Read the peaks from the kernel."""
        parents, below, fresh = _parents(), set[int](), {self._root}
        while fresh := {pid for pid, parent in parents.items() if parent in fresh} - below:
            below |= fresh
        for pid in below:
            with contextlib.suppress(OSError, StopIteration):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                self._held[pid] = int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


@contextlib.contextmanager
def peaks(root: int) -> Iterator[Peaks]:
    """Sample periodically until the block ends."""
    found, done = Peaks(root), threading.Event()

    def watch() -> None:
        while not done.wait(EVERY_SECONDS):
            found.look()

    thread = threading.Thread(target=watch, name="memory", daemon=True)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def _parents() -> dict[int, int]:
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            found[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    return found
