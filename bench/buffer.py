"""The buffer against TransferQueue, Ray objects, msgpack lists over ZeroMQ and the bare disk.

python bench/buffer.py [--shapes big,small] [--systems fsync,process,transferqueue,ray,zeromq]
[--share 1.0] [--rounds 1]

Every system moves the same groups from one producing process to one consuming process, which checks
each byte. Four puts of one group each are in flight, sent and not answered (our client encodes the
next four meanwhile; the peers' have no such step, they encode as they send); gets take a batch.
Seconds are from the first put to the last byte checked; CPU seconds are those of all processes of a
system, its servers included, between the two. Peers run first, so that the memory which they
touched is not new to ours; the bare disk runs beside each fsync round. Prints one line a system,
then each bar with what was seen, and ends with 1 where one is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from buffer_load import Shape, shape_of
from record import recorded

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".venv-buffer" / "bin" / "python"
OURS = ("fsync", "process")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Seen:
    """What one run showed; bytes verified are those of the arrays."""

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
    parser = argparse.ArgumentParser(description="Measure the buffer beside its peers.")
    parser.add_argument("--shapes", default="big,small")
    parser.add_argument("--systems", default="transferqueue,ray,zeromq,process,fsync")
    parser.add_argument("--share", type=float, default=1.0, help="share of the groups, for a quick look")
    parser.add_argument("--rounds", type=int, default=1, help="medians of that many")
    parser.add_argument("--folder", default=str(ROOT), help="folder on the disk that is measured")
    args = parser.parse_args()
    adopt()
    with recorded("buffer") as figures:
        met = [measure(name, args, figures.setdefault(name, {})) for name in args.shapes.split(",")]
    sys.exit(0 if all(met) else 1)


def measure(name: str, args: argparse.Namespace, figures: dict[str, Any]) -> bool:
    """Run the systems on a shape; whether every bar is met."""
    shape = shape_of(name, args.share)
    print(
        f"{name}: {shape.groups:,} groups of {shape.size} x {shape.tokens:,} tokens, {shape.group_bytes / 1e6:.3g} MB each",
        flush=True,
    )
    seen: dict[str, Seen] = {}
    disk: list[float] = []
    for system in args.systems.split(","):
        rounds = []
        for _ in range(args.rounds):
            rounds.append(one(system, name, args.share, shape, args.folder))
            if system == "fsync" and name == "big":
                disk.append(bare_disk(shape, args.folder))
        rounds.sort(key=lambda each: each.seconds)
        seen[system] = median = rounds[len(rounds) // 2]
        figures[system] = {
            "megabytes_per_second": median.megabytes,
            "groups_per_second": median.rate,
            "cpu_seconds": median.cpu,
            "peak_memory_bytes": median.memory,
            "verified_bytes": median.verified,
        }
        print(
            f"  {system:<14}{median.megabytes:8.0f} MB/s {median.rate:9.1f} groups/s {median.cpu:7.2f} CPU s "
            f"{median.memory / 2**20:8.0f} MB peak  {median.verified / 1e6:,.0f} MB verified",
            flush=True,
        )
    bare = statistics.median(disk) if disk else 0
    if disk:
        print(f"  {'bare disk':<14}{bare:8.0f} MB/s")
        figures["bare disk"] = {"megabytes_per_second": bare}
    return bars(name, seen, bare, figures)


def bars(shape: str, seen: dict[str, Seen], disk: float, figures: dict[str, Any]) -> bool:
    """Print each bar whose systems were measured; whether all are met."""
    wanted = (
        [
            ("fsync", "MB/s of the bare disk's", lambda ours: ours.megabytes / disk if disk else None, 0.8),
            ("process", "MB/s of TransferQueue's", lambda ours: over(ours.megabytes, seen, "transferqueue", "megabytes"), 2.5),
            ("process", "MB/s of Ray's", lambda ours: over(ours.megabytes, seen, "ray", "megabytes"), 1.0),
            ("process", "CPU: TransferQueue's of ours", lambda ours: under(ours.cpu, seen, "transferqueue"), 2.0),
            ("fsync", "CPU: TransferQueue's of ours", lambda ours: under(ours.cpu, seen, "transferqueue"), 2.0),
        ]
        if shape == "big"
        else [
            ("fsync", "groups/s of TransferQueue's", lambda ours: over(ours.rate, seen, "transferqueue", "rate"), 15.0),
            ("fsync", "groups/s of ZeroMQ lists'", lambda ours: over(ours.rate, seen, "zeromq", "rate"), 1.0),
            ("fsync", "CPU: TransferQueue's of ours", lambda ours: under(ours.cpu, seen, "transferqueue"), 10.0),
        ]
    )
    met = True
    for system, what, ratio, bar in wanted:
        value = ratio(seen[system]) if system in seen else None
        if value is None:
            continue
        met &= value >= bar
        figures.setdefault("bars", []).append({"system": system, "ratio": what, "value": value, "bar": bar, "met": value >= bar})
        print(f"  {'met' if value >= bar else 'MISSED':<7} {system:<8} {what:<30} {value:6.2f} (bar {bar})")
    return met


def over(ours: float, seen: dict[str, Seen], peer: str, what: str) -> float | None:
    return ours / getattr(seen[peer], what) if peer in seen else None


def under(ours: float, seen: dict[str, Seen], peer: str) -> float | None:
    return seen[peer].cpu / ours if peer in seen else None


def one(system: str, name: str, share: float, shape: Shape, folder: str) -> Seen:
    """Run a system once; its processes are descendants of this one, orphans included."""
    here = Path(__file__).parent
    command = (
        [sys.executable, here / "buffer_ours.py", name, str(share), system, folder]
        if system in OURS
        else [PEERS, here / "buffer_peer.py", name, str(share), system]
    )
    if not Path(command[0]).exists():
        sys.exit(f"{command[0]} is not there: run scripts/venv_buffer")
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
    return Seen(seconds, spent, peak[0], verified, shape.groups)


def bare_disk(shape: Shape, folder: str) -> float:
    """MB/s of the same bytes, a group a write: the faster of a sync a group and one for the puts in
    flight."""
    data = np.random.default_rng(1).bytes(shape.group_bytes)
    path = Path(folder, f"bench-buffer-disk-{os.getpid()}")
    best = 0.0
    for every in (1, 4):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            began = time.perf_counter()
            for group in range(shape.groups):
                os.write(file, data)
                if group % every == every - 1:
                    os.fdatasync(file)
            os.fdatasync(file)
            best = max(best, shape.groups * shape.group_bytes / (time.perf_counter() - began) / 1e6)
        finally:
            os.close(file)
            path.unlink()
    return best


def adopt() -> None:
    """Become the parent of orphans, so that servers which leave their parents are still counted."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def reap() -> None:
    """Take leave of adopted children that have ended."""
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
    """Processor seconds of all descendants and of the children that they have waited for."""
    ticks = 0
    for pid in descendants():
        try:
            fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(int(field) for field in fields[11:15])
    return ticks / _TICKS


def watch_memory(peak: list[int], stop: threading.Event) -> None:
    """Anonymous and shared memory of all descendants, several times a second; pages of files are
    the kernel's to drop."""
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
