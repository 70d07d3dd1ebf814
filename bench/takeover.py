"""Measures the time until another process takes over: a replica of scheduler, buffer, or
controller, or a worker that gets the prompts of a dead one.

    make bench-takeover ARGS="[--kills 10] [--only scheduler] [--check]"

A run without a model continues during the measurement, on PostgreSQL, Consul, a NATS cluster, and
S3, with a replica of each of the three services. Their leader is killed (-9), or stopped (SIGSTOP)
until another one leads, and each is repeated. The output has the medians and maxima of the times
from the signal to the registration of another leader, and to the next step; and the longest time
between two steps until the learner has made steps that the new leader issued. A scheduler that
takes over must continue with the same worker processes. Then an inference worker with unfinished
prompts is killed as often, and the time until another worker has started the last of them is
measured. With `--check` the exit code is 1 if a median is above 5 s, if the longest time to a step
after a kill of the scheduler is above 3 s, or if the run did not recover from a kill within two
minutes.

Every kill is stored in `.cache/bench/takeover.jsonl`, so an interrupted bench resumes; `--fresh`
starts from scratch. 70 kills take about 20 minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
from faults import is_worker
from mesh import REPLICATED, ROOT, until
from production import Production
from record import recorded
from sim import SAMPLES, Job, audited, sim_mesh, submit

from rollout.run.v1 import run_pb2
from rollout_testing.sim import journal

BAR_SECONDS = 5.0
SCHEDULER_SECONDS = 3.0
"""The bar for the next step after each kill of the leading scheduler."""
AHEAD = 3
"""Steps after a signal of which the last one has prompts that only the new leader can have
issued."""
PACE, LONG_PACE = 0.1, 0.5
"""The longest duration of a sample in seconds. The longer one is for kills of a worker, which must
have unfinished prompts."""

WORKER = "worker, kill -9"


class Bench:
    """One run, and the faults of the processes that control it."""

    def __init__(self, production: Production, run: str) -> None:
        self.running, self.run = production.running, run
        self.directory = Path(self.status().run.directory)

    def status(self) -> run_pb2.RunStatus:
        """Call until a replica answers."""
        while True:
            with contextlib.suppress(grpc.RpcError, OSError, ValueError):
                return self.running.scheduler.GetRun(run_pb2.GetRunRequest(run_id=self.run), timeout=2).status

    def newest(self) -> int:
        """The newest step that the learner has made."""
        return max((record["step"] for record in journal.read(self.directory, "learner")), default=0)

    def take_over(self, service: str, stopping: bool) -> tuple[float, ...]:
        """The seconds until another replica leads, until the learner has made a step after the
        signal, the most between two of the next steps, and those of a step without a fault."""
        epoch, name = self.running.leader(service)
        workers = self.workers()
        step, times, led = self.newest(), [time.monotonic()], 0.0
        if stopping:
            self.running.frozen.add(name)
            self.running.processes[name].send_signal(signal.SIGSTOP)
        else:
            self.running.kill(name)

        def moved() -> bool:
            nonlocal led
            now = time.monotonic()
            if not led and self.running.leader(service)[0] > epoch:
                led = now - times[0]
            times.extend([now] * min(AHEAD + 1 - len(times), self.newest() - step + 1 - len(times)))
            return led > 0 and len(times) > AHEAD

        until(moved, "another leader and its first step", 120)
        if stopping:
            self.running.processes[name].send_signal(signal.SIGCONT)
            self.running.frozen.discard(name)
        else:
            self.running.start_service(name)
        undisturbed = self.settle()
        if service == "scheduler":
            assert self.workers() == workers, f"workers were restarted: {workers}, then {self.workers()}"
        return led, times[1] - times[0], max(b - a for a, b in itertools.pairwise(times)), undisturbed

    def workers(self) -> dict[str, int]:
        """The process of each worker."""
        return {worker.worker_id: worker.pid for worker in self.status().workers}

    def redispatch(self, dice: random.Random) -> float:
        """The seconds until all unfinished prompts of a killed worker are started again."""
        while True:
            workers = [w for w in self.status().workers if w.kind == "inference" and w.address and is_worker(w.pid)]
            if workers:
                victim = dice.choice(workers)
                if self.in_hand(victim.worker_id):
                    break
        os.kill(victim.pid, signal.SIGKILL)
        killed = time.time()
        owed = self.in_hand(victim.worker_id)
        if not owed:
            return self.redispatch(dice)
        last: dict[str, float] = {}

        def again() -> bool:
            for record in journal.read(self.directory, "began-inference"):
                if record["request"] in owed and record["at"] > killed:
                    last.setdefault(record["request"], record["at"])
            return len(last) == len(owed)

        until(again, f"{owed} to be started again", 60)
        self.settle()
        return max(last.values()) - killed

    def in_hand(self, worker: str) -> set[str]:
        """The groups that a worker has started and not finished."""
        begun = [record["request"] for record in journal.read(self.directory, f"began-{worker}")]
        done: dict[str, int] = {}
        for record in journal.read(self.directory, "inference"):
            done[record["request"]] = done.get(record["request"], 0) + 1
        return {request for request in begun[-8:] if done.get(request, 0) < SAMPLES}

    def settle(self) -> float:
        """Wait until the run works again: all workers serve, and three more steps are made. The
        seconds of each of the last two."""
        until(lambda: all(worker.address for worker in self.status().workers), "all workers", 120)
        step = self.newest() + 1
        until(lambda: self.newest() >= step, "another step", 120)
        began = time.monotonic()
        until(lambda: self.newest() >= step + 2, "two more steps", 120)
        return (time.monotonic() - began) / 2


KEPT = ROOT / ".cache" / "bench" / "takeover.jsonl"
"""Every measured kill, one per line, from which an interrupted bench resumes."""

MOST_FAILURES = 3


def read_kept() -> dict[str, list[list[float]]]:
    """The seconds of each kill, by process and signal."""
    kept: dict[str, list[list[float]]] = {}
    if KEPT.exists():
        for line in KEPT.read_text().splitlines():
            with contextlib.suppress(ValueError, KeyError):  # a truncated line
                record = json.loads(line)
                kept.setdefault(record["kill"], []).append(record["seconds"])
    return kept


def rows() -> dict[str, tuple[str, bool]]:
    """The processes and signals in order."""
    table = {f"{s}, {'SIGSTOP' if f else 'kill -9'}": (s, f) for s in REPLICATED for f in (False, True)}
    return table | {WORKER: ("", False)}


def measure(kills: int, chosen: dict[str, tuple[str, bool]], pace: float) -> None:
    """Repeat each kill until there are enough, with the same services, and store every figure."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        job = Job(root / "job", steps=1_000_000, snapshot=20)
        with Production(root / "state", sim_mesh(root / "state" / "mesh", "replicas", seconds=pace)) as production:
            bench = Bench(production, submit(production.running, production.running.plan(job.write()), job))
            bench.settle()
            dice = random.Random(time.time())
            for name, (service, stopping) in chosen.items():
                for _ in range(kills - len(read_kept().get(name, []))):
                    seconds = bench.take_over(service, stopping) if service else (bench.redispatch(dice),)
                    with KEPT.open("a") as out:
                        out.write(json.dumps({"kill": name, "seconds": seconds}) + "\n")
                    print(f"{name:29} {', '.join(f'{s:.2f} s' for s in seconds)}", flush=True)
            production.running.scheduler.CancelRun(run_pb2.CancelRunRequest(run_id=bench.run, drain=True))
            until(lambda: bench.status().run.state == run_pb2.RUN_STATE_CANCELLED, "the run to be cancelled", 60)
            assert audited(production.running, bench.run)["whole"]


def tell(kills: int, chosen: dict[str, tuple[str, bool]], figures: dict[str, Any]) -> list[str]:
    """Print the medians. Returns those above the bar."""
    slow: list[str] = []
    kept = read_kept()
    print(f"medians of {kills} kills; bar {BAR_SECONDS:.0f} s, after a killed scheduler {SCHEDULER_SECONDS:.0f} s")
    for name, (service, stopping) in chosen.items():
        columns = list(zip(*kept[name][:kills], strict=True))
        what = (
            ("another leads after", "next step after", "longest time to a step", "without a fault")
            if service
            else ("its prompts are started again after",)
        )
        medians = [f"{w} {statistics.median(c):.2f} s (max {max(c):.2f})" for w, c in zip(what, columns, strict=True)]
        print(f"{name:29} {', '.join(medians)}", flush=True)
        figures[name] = {w: {"median": statistics.median(c), "most": max(c)} for w, c in zip(what, columns, strict=True)}
        late = service == "scheduler" and not stopping and max(columns[2]) > SCHEDULER_SECONDS
        slow += [name] if late or statistics.median(columns[0]) > BAR_SECONDS else []
    figures.update(bar=BAR_SECONDS, kills=kills, above=slow, met=not slow)
    return slow


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--only", choices=(*REPLICATED, "worker"), help="the process to disturb (default: each)")
    parser.add_argument("--fresh", action="store_true", help="discard the stored kills")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    if given.fresh:
        KEPT.unlink(missing_ok=True)
    chosen = {name: row for name, row in rows().items() if given.only in (None, row[0] or "worker")}
    failures = 0
    with recorded("takeover") as figures:
        while left := {name: row for name, row in chosen.items() if len(read_kept().get(name, [])) < given.kills}:
            services = {name: row for name, row in left.items() if row[0]}
            try:
                measure(given.kills, services or left, PACE if services else LONG_PACE)
            except (AssertionError, OSError, grpc.RpcError) as error:
                failures += 1
                print(f"restarting all processes after {type(error).__name__}: {error}", flush=True)
                if failures > MOST_FAILURES:
                    raise
        figures["failures"] = failures
        slow = tell(given.kills, chosen, figures)
        if slow:
            print(f"above the bar: {', '.join(slow)}")
        if failures:
            print(f"{failures} kills were not recovered from in time and are not among the figures")
    return int(given.check and bool(slow or failures))


if __name__ == "__main__":
    sys.exit(main())
