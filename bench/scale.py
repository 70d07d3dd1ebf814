"""Measures one control plane with 10, 100, and 1,000 simulated inference workers and a real
`rolloutd`.

    make bench-scale ARGS="[--sizes 10,100,1000] [--seconds 40] [--rate 50] [--check]"

One `rolloutd` runs all services on this machine, like for a user: SQLite, embedded NATS and
registry, fsynced segments. The run is an asynchronous GRPO run with groups of 8. One process
(`cmd/internal/fleet`) simulates its workers. Each registers and renews its entry, has two NATS
connections, pulls work, reports progress and its status every second, loads weights after every
step, and publishes groups. Completions have lognormal lengths (mean 1,000 tokens, sigma 0.8, at
most 4,096; about 17 KB per sample) and grow by 50 tokens per second in each of 16 slots. At the
start the slots have samples with random progress, so the rate is steady after a minute. Only
`rolloutd` is measured; the cores of the simulated workers are reported separately. The three sizes
take about 7 minutes.

Printed for each size: samples per second, processor time per sample (user and system, of the whole
process), and resident memory. In a small run the idle daemon's processor time is divided by fewer
samples, so the second figure excludes it. With `--check` the exit code is 1 if the processor time
per sample, by either figure, is more than 1.2 times that of the smallest size. On a machine with
other load, lower `--rate`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
from mesh import ROOT, Mesh, describe
from record import recorded

from rollout.buffer.v1 import buffer_pb2
from rollout.run.v1 import run_pb2
from rollout_testing.sim import policy

MOST_GROWTH = 1.2
GROUP, SLOTS, ROWS = 8, 16, 20_000
FLEET = ROOT / ".cache" / "fleet"

_CONFIG = """
name = "scale"
seed = 1
mode = "async"

[model]
path = "model"

[data]
train = "train.jsonl"

[sampling]
group_size = {group}
max_tokens = 3840

[reward]
plugin = "reward.py:nothing"

[algorithm.grpo]

[train]
steps = 100000
groups_per_step = {groups}
learning_rate = 1e-6

[engine]
slots = {slots}
max_model_len = 4096
workers = {workers}

[staleness]
max_steps = 6
"""

_REWARD = "def nothing(samples):\n    return [0.0] * len(samples)\n"

_STAND_IN = """trap 'exit 0' TERM
printf '%s %s\\n' "$$" "$ROLLOUT_WORKER_SPEC" 1<> "$ROLLOUT_FLEET"
read -r end
"""


@dataclass(frozen=True)
class Figures:
    """The figures of one size. memory: maximum resident bytes."""

    workers: int
    samples: int
    seconds: float
    processor: float
    idle: float  # processor seconds per second of an idle daemon
    memory: int
    fleet: float  # processor seconds of the process that simulates the workers

    @property
    def rate(self) -> float:
        return self.samples / self.seconds

    @property
    def each(self) -> float:
        """Processor time per sample in microseconds."""
        return 1e6 * self.processor / self.samples

    @property
    def net(self) -> float:
        """The same without that of the idle daemon."""
        return 1e6 * (self.processor - self.idle * self.seconds) / self.samples


def processor(pid: int) -> float:
    """Seconds of user and system time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> int:
    return 1024 * int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0])


def write_job(folder: Path, workers: int) -> Path:
    """Write a config and its files. A step consumes two groups per worker, which fill its slots."""
    folder.mkdir()
    policy.write_model(folder / "model")
    rows = (json.dumps({"prompt": f"row {n}: " + "x" * 200, "answer": str(n)}) for n in range(ROWS))
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "reward.py").write_text(_REWARD)
    (folder / "stand-in.sh").write_text(_STAND_IN)
    path = folder / "job.toml"
    path.write_text(_CONFIG.format(group=GROUP, slots=SLOTS, workers=workers, groups=max(2, SLOTS // GROUP * workers)))
    return path


def measure(folder: Path, workers: int, warm: float, seconds: float, rate: float) -> Figures:
    config = write_job(folder / "job", workers)
    fifo = folder / "workers"
    os.mkfifo(fifo, 0o600)
    log = (folder / "fleet.log").open("wb")
    fleet = subprocess.Popen([str(FLEET), "--fifo", str(fifo), "--rate", str(rate)], stderr=log)
    running = Mesh(
        folder / "state",
        arguments=("--worker-command", f"/bin/sh {config.parent / 'stand-in.sh'}", "--worker-python", sys.executable),
        environment={"PYTHONPATH": str(ROOT / "python"), "ROLLOUT_FLEET": str(fifo)},
    )
    try:
        running.start()
        pid = running.processes["all"].pid
        lock = running.plan(config)
        began, spent = time.monotonic(), processor(pid)
        time.sleep(5)
        idle = (processor(pid) - spent) / (time.monotonic() - began)
        created = running.scheduler.CreateRun(run_pb2.CreateRunRequest(lock=lock, base_dir=str(config.parent)))
        run = created.run.run_id
        deadline = time.monotonic() + 120 + 0.3 * workers + 5000 / rate
        while ledger(running, run).step < 1:
            insist(running, run, time.monotonic() < deadline)
            time.sleep(2)
        time.sleep(warm)
        played = processor(fleet.pid)
        spent, samples, began = processor(pid), ledger(running, run).samples, time.monotonic()
        memory = 0
        while time.monotonic() - began < seconds:
            time.sleep(1)
            memory = max(memory, resident(pid))
        samples = ledger(running, run).samples - samples
        spent, took, played = processor(pid) - spent, time.monotonic() - began, processor(fleet.pid) - played
        figures = Figures(workers, samples, took, spent, idle, memory, played)
        insist(running, run, samples > 0)
        return figures
    finally:
        fleet.terminate()
        fleet.wait(60)
        log.close()
        for process in running.processes.values():
            os.killpg(process.pid, signal.SIGKILL)  # its state is discarded
            process.wait(30)


def ledger(running: Mesh, run: str) -> buffer_pb2.LedgerState:
    """The counters of the ledger; zero before it is opened."""
    try:
        return next(iter(running.buffer.WatchLedger(buffer_pb2.WatchLedgerRequest(run_id=run)))).state
    except grpc.RpcError:
        return buffer_pb2.LedgerState()


def insist(running: Mesh, run: str, well: bool) -> None:
    """Describe the run if something is wrong."""
    if not well:
        raise AssertionError(describe(running.status(run)) + "\n" + running.log("all"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="10,100,1000")
    parser.add_argument("--warm", type=float, default=15, help="seconds between the first step and the start of the measurement")
    parser.add_argument("--seconds", type=float, default=40, help="seconds of the measurement, about two steps")
    parser.add_argument("--rate", type=float, default=50, help="tokens per second of a slot")
    parser.add_argument("--check", action="store_true", help="exit with code 1 if the processor time per sample grows too much")
    given = parser.parse_args()
    FLEET.parent.mkdir(exist_ok=True)
    subprocess.run(["go", "build", "-o", str(FLEET), "./internal/fleet"], cwd=ROOT / "cmd", check=True)
    all_figures: list[Figures] = []
    with recorded("scale") as kept:
        print("workers  samples/s  processor time a sample  less the idle daemon's  cores  the fleet's  memory", flush=True)
        for size in map(int, given.sizes.split(",")):
            with tempfile.TemporaryDirectory() as folder:
                f = measure(Path(folder), size, given.warm, given.seconds, given.rate)
            all_figures.append(f)
            kept[f"{size} workers"] = asdict(f) | {"rate": f.rate, "microseconds_a_sample": f.each, "less_idle": f.net}
            print(
                f"{size:7}  {f.rate:9.0f}  {f.each:20.0f} us  {f.net:19.0f} us  {f.processor / f.seconds:5.2f}  "
                f"{f.fleet / f.seconds:11.2f}  {f.memory / 2**20:.0f} MB",
                flush=True,
            )
        first = all_figures[0]
        growth = max(max(f.each / first.each, f.net / first.net) for f in all_figures)
        kept.update(growth=growth, bar=MOST_GROWTH, met=growth <= MOST_GROWTH)
        print(f"most growth of processor time a sample: {growth:.2f} times (bar: {MOST_GROWTH})")
    return int(given.check and growth > MOST_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
