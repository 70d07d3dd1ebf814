"""Measures how long boxes take to start, and starts many at once.

    make bench-sandbox; or PYTHONPATH=python python bench/sandbox.py [--rounds 100] [--many 200] [--check]

`cold` builds a box for each command, `warm` takes one that was built before, `exec` runs a command
in an open box, `interpreter` takes a box whose python3 already runs and waits for its first answer.
`start` is the time from the request to the execution of the program, as `rollout-sandbox` reports
it; `call` is what the client waits for `true` (or the answer), connection included. `many` opens
boxes that all run a command at the same time. With `--check` the exit code is 1 if the median of
warm starts is 20 ms or more, or if not all boxes run at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

from rollout.sandbox import Limits, Sandbox, Sandboxes, Spec

BAR_S = 0.020
TRUE = ["true"]


def row(name: str, seconds: list[float]) -> str:
    ordered = sorted(seconds)
    p95 = ordered[min(len(ordered) - 1, round(0.95 * len(ordered)))]
    return f"{name:<20} p50 {statistics.median(ordered) * 1000:7.1f} ms   p95 {p95 * 1000:7.1f} ms   n {len(ordered)}"


async def measure(rounds: int, pause: float, once: Callable[[], Awaitable[float]]) -> tuple[list[float], list[float]]:
    """Start times and call times of a measurement, with a pause in which warm boxes are built."""
    starts: list[float] = []
    calls: list[float] = []
    for _ in range(rounds):
        begin = time.perf_counter()
        starts.append(await once())
        calls.append(time.perf_counter() - begin)
        await asyncio.sleep(pause)
    return starts, calls


async def single(rounds: int) -> float:
    """One box after the other; returns the median of warm starts."""
    cold, warm, shell = Spec(), Spec(limits=Limits(pids=127)), Spec(limits=Limits(pids=126))
    async with Sandboxes() as server:

        async def run_cold() -> float:
            begin = time.perf_counter()
            result = await server.run(cold, TRUE)
            return time.perf_counter() - begin - result.wall_time_s

        async def run_warm() -> float:
            return (await server.run(warm, TRUE)).start_s

        async def interpret() -> float:
            begin = time.perf_counter()
            async with server.open(shell) as box:
                assert box.prestarted is not None
                await box.prestarted.write(b"print(6 * 7)\n")
                assert await box.prestarted.read() == ("stdout", b"42\n")
                return time.perf_counter() - begin

        starts, calls = await measure(rounds, 0, run_cold)
        print(row("cold start", starts), row("cold call", calls), sep="\n")
        await server.warm(warm, 4)
        starts, calls = await measure(rounds, 0.03, run_warm)
        median = statistics.median(starts)
        print(row("warm start", starts), row("warm call", calls), sep="\n")
        async with server.open(cold) as box:

            async def run_open() -> float:
                return (await box.run(TRUE)).start_s

            starts, calls = await measure(rounds, 0.03, run_open)
            print(row("exec start", starts), row("exec call", calls), sep="\n")
        loop = "import sys\nfor line in sys.stdin: exec(line); sys.stdout.flush()"
        await server.warm(shell, 4, ["python3", "-I", "-S", "-c", loop])
        _, calls = await measure(rounds, 0.1, interpret)
        print(row("interpreter call", calls))
        return median


async def many(count: int) -> int:
    """Boxes that run a command at the same time; returns how many did."""
    async with Sandboxes() as server:
        begin = time.perf_counter()
        await server.warm(Spec(), count)
        built = time.perf_counter() - begin
        boxes = [server.open(Spec()) for _ in range(count)]
        begin = time.perf_counter()
        await asyncio.gather(*(box.__aenter__() for box in boxes))
        commands = [await box.start(["sh", "-c", "echo up; exec sleep 600"]) for box in boxes]
        answers = [await command.read() for command in commands]
        started = time.perf_counter() - begin
        running = sum(answer == ("stdout", b"up\n") for answer in answers)
        memory = resident(server)
        results = await asyncio.gather(*(box.run(["echo", "again"]) for box in boxes))
        running = min(running, sum(result.ok for result in results))
        begin = time.perf_counter()
        await asyncio.gather(*(box.__aexit__() for box in boxes))
    print(f"{running} of {count} boxes ran at once: built in {built:.2f} s, started in {started:.2f} s, "
          f"{memory / count:.1f} MB each (proportional), ended in {time.perf_counter() - begin:.2f} s")  # fmt: skip
    return running


def resident(server: Sandboxes) -> float:
    """Megabytes of the server and everything below it, shared pages counted once."""
    parents, total = {server.pid}, 0
    table = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=False).stdout
    pairs = [tuple(int(n) for n in line.split()) for line in table.splitlines()]
    while found := {pid for pid, parent in pairs if parent in parents} - parents:
        parents |= found
    for pid in parents:
        try:
            with open(f"/proc/{pid}/smaps_rollup") as lines:
                total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except OSError:
            continue
    return total / 1024


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--many", type=int, default=200)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    report = Sandbox.probe()
    if not report.ok:
        print(f"this host builds no boxes: {report.error}")
        return 1 if args.check else 0
    limits = ", ".join(f"{e.name} by {e.by}" for e in report.limits if e.name in ("memory_bytes", "pids", "cpus"))
    print(f"uid {os.geteuid()}; {limits}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    median = asyncio.run(single(args.rounds))
    running = asyncio.run(many(args.many))
    print(f"load {os.getloadavg()[0]:.1f}")
    return int(args.check and (median >= BAR_S or running < args.many))


if __name__ == "__main__":
    sys.exit(main())
