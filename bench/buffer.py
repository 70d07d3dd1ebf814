"""The path of trajectories from worker to learner, next to TransferQueue, Ray objects, and ZeroMQ.

python bench/buffer.py [--shapes big,small] [--systems fsync,process,transferqueue,ray,zeromq]
    [--share 1.0] [--rounds 1]

Every system moves the same groups from one producing process to one consuming process, which checks
each byte. ``fsync`` and ``process`` are the path that rollout's workers use: Publisher, JetStream,
ingest, ledger, lease, and the learner's reader (buffer_ours.py). At most four groups are being sent
at a time; the consumer takes a batch at a time. Seconds are from the first put to the last checked
byte. CPU seconds are those of all processes of a system, its servers included. What survives which
failure is printed next to each figure. The peers store nothing, so no bar is set.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buffer_load import Shape, shape_of
from record import recorded

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".venv-buffer" / "bin" / "python"
DURABILITY = {
    "fsync": "ledger and payloads survive a power cut",
    "process": "ledger and payloads survive SIGKILL",
    "transferqueue": "nothing survives",
    "ray": "nothing survives",
    "zeromq": "nothing survives",
}
OURS = ("fsync", "process")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Round:
    """The result of one round. verified: number of checked bytes. memory: peak in bytes."""

    seconds: float
    cpu: float
    memory: int
    verified: int
    groups: int

    @property
    def megabytes(self) -> float:
        return self.verified / self.seconds / 1e6

    @property
    def rate(self) -> float:
        return self.groups / self.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the path of trajectories with other systems.")
    parser.add_argument("--shapes", default="big,small")
    parser.add_argument("--systems", default="transferqueue,ray,zeromq,process,fsync")
    parser.add_argument("--share", type=float, default=1.0, help="share of the groups, for a short test")
    parser.add_argument("--rounds", type=int, default=1, help="number of rounds; each measures every system")
    parser.add_argument("--folder", default=str(ROOT), help="folder on the disk to measure")
    args = parser.parse_args()
    adopt_orphans()
    with recorded("buffer") as figures:
        for name in args.shapes.split(","):
            measure(name, args, figures.setdefault(name, {}))


def measure(name: str, args: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Print every round of every system on a shape."""
    shape = shape_of(name, args.share)
    size = shape.group_bytes / 1e6
    print(f"{name}: {shape.groups:,} groups of {shape.size} x {shape.tokens:,} tokens, {size:.3g} MB each", flush=True)
    for number in range(args.rounds):
        for system in args.systems.split(","):
            result = one(system, name, args.share, shape, args.folder)
            figures.setdefault(system, []).append(
                {
                    "megabytes_per_second": result.megabytes,
                    "groups_per_second": result.rate,
                    "cpu_seconds": result.cpu,
                    "peak_memory_bytes": result.memory,
                    "verified_bytes": result.verified,
                    "durability": DURABILITY[system],
                }
            )
            print(
                f"  {number + 1} {system:<14}{result.megabytes:8.0f} MB/s {result.rate:9.1f} groups/s {result.cpu:7.2f} CPU s "
                f"{result.memory / 2**20:8.0f} MB peak  {DURABILITY[system]}",
                flush=True,
            )


def one(system: str, name: str, share: float, shape: Shape, folder: str) -> Round:
    """Run a system once. Its processes are descendants of this one, orphans included."""
    here = Path(__file__).parent
    command = (
        [sys.executable, here / "buffer_ours.py", name, str(share), system, folder]
        if system in OURS
        else [PEERS, here / "buffer_peer.py", name, str(share), system]
    )
    if not Path(command[0]).exists():
        sys.exit(f"{command[0]} is missing: run scripts/venv_buffer")
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python")} if system in OURS else dict(os.environ)
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    errors: list[str] = []
    threading.Thread(target=lambda: errors.extend(child.stderr or []), daemon=True).start()
    peak, stop = [0], threading.Event()
    watch = threading.Thread(target=watch_memory, args=(peak, stop), daemon=True)
    began = cpu = 0.0
    result: tuple[float, float, int] | None = None
    for line in child.stdout or []:
        if line.startswith("begin"):
            cpu, began = tree_cpu(), time.perf_counter()
            watch.start()
        elif line.startswith("end"):
            seconds = time.perf_counter() - began
            result = seconds, tree_cpu() - cpu, json.loads(line[4:])["verified"]
            stop.set()
    code = child.wait()
    stop.set()
    reap()
    if result is None or code != 0:
        sys.exit(f"{system} failed with exit code {code}:\n{''.join(errors[-40:])}")
    seconds, spent, verified = result
    if verified != shape.groups * shape.group_bytes:
        sys.exit(f"{system}: {verified:,} bytes verified of {shape.groups * shape.group_bytes:,}")
    return Round(seconds, spent, peak[0], verified, shape.groups)


def adopt_orphans() -> None:
    """Become the parent of orphans, so that servers that detach from their parents are counted."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def reap() -> None:
    """Collect adopted children that have ended."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


def descendants() -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry))
    found, todo = [], [os.getpid()]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found


def tree_cpu() -> float:
    """CPU seconds of all descendants and of the children that they have waited for."""
    ticks = 0
    for pid in descendants():
        try:
            fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(int(field) for field in fields[11:15])
    return ticks / _TICKS


def watch_memory(peak: list[int], stop: threading.Event) -> None:
    """Record the peak of anonymous and shared memory of all descendants. File pages are not
    counted: the kernel can drop them."""
    while not stop.is_set():
        total = 0
        for pid in descendants():
            try:
                text = Path("/proc", str(pid), "status").read_text()
            except OSError:
                continue
            total += sum(1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith(("RssAnon", "RssShmem")))
        peak[0] = max(peak[0], total)
        stop.wait(0.3)


if __name__ == "__main__":
    main()
