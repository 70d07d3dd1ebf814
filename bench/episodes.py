"""Measures how busy episodes of many turns keep the slots of the engines, with a real `rolloutd`
and real workers whose engine is simulated.

    make bench-episodes ARGS="[--episodes 2000] [--turns 20] [--slots 400] [--seconds 2] [--check]"

The run is an asynchronous GRPO run with groups of 8 whose environment, a class in child processes
(`kind = "python"`), thinks after each turn. A decode takes lognormal time (sigma 0.6) with a mean
of `--seconds`, and so does a thought. The workers keep up to 2.5 times as many episodes open as
there are slots: 1,000 for 400 slots. The engine has exactly `--slots` slots, and a turn that finds
none waits.

Busy is the share of slots that decode, over all slots, from the first moment at which that many
episodes were open until the last prompt group was started. Printed for each window of ten seconds
and for all of them, with the largest number of open episodes, and the processor time per turn of
`rolloutd` (all services), of the inference workers (their engine is this simulation), and of the
environment's processes. With `--check` the exit code is 1 if fewer than 95 % of the slots are busy
or more than 2.5 episodes per slot were open. On a machine with other load, raise `--seconds`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.environment import Observation, Result, SingleEpisode, Task, Turn

if TYPE_CHECKING:
    from mesh import Mesh

    from rollout_workers.engines.base import GroupRequest, SampleOutput

BAR, MOST_OPEN = 0.95, 2.5
GROUP, SIGMA, WINDOW = 8, 0.6, 10.0
SETTINGS = "ROLLOUT_BENCH_EPISODES"

_CONFIG = """
name = "episodes"
seed = 1
mode = "async"

[environment]
kind = "python"
path = "episodes.py:Think"
args = {{ turns = {turns}, seconds = {seconds} }}
max_turns = {turns}
concurrency = {concurrency}
turn_timeout_seconds = 86400
episode_timeout_seconds = 86400

[model]
path = "model"

[data]
train = "train.jsonl"

[sampling]
group_size = {group}
max_tokens = 16

[algorithm.grpo]

[train]
steps = {steps}
groups_per_step = {groups}
learning_rate = 1e-6

[engine]
slots = {slots}
max_model_len = 1024
workers = {workers}

[staleness]
max_steps = 16

[snapshot]
every_steps = 0
"""


def lognormal(mean: float, draw: random.Random) -> float:
    """A duration in seconds, at most six times the mean."""
    return min(6 * mean, draw.lognormvariate(-(SIGMA**2) / 2, SIGMA) * mean)


class Think(SingleEpisode):
    """An environment that waits after each turn, and ends after the last."""

    def __init__(self, turns: int, seconds: float) -> None:
        self.turns, self.seconds = turns, seconds

    def reset(self, task: Task) -> str:
        return json.loads(task.row_json)["prompt"]

    async def step(self, turn: Turn) -> Observation | Result:
        await asyncio.sleep(lognormal(self.seconds, random.Random(f"{turn.seed}/{turn.number}")))
        if turn.number + 1 == self.turns:
            return Result(reward=turn.seed % 1000 / 1000)
        return Observation(text="next:")


def work(kind: str) -> None:
    """Be a worker of the run."""
    from rollout_testing.sim.install import install

    install()

    from paced import PacedEngine, use

    from rollout_testing.sim.journal import Journal
    from rollout_workers.inference import worker
    from rollout_workers.inference.puller import Puller

    if kind == "inference":
        load, seconds = worker.load, float(os.environ[SETTINGS])
        engines: list[Paced] = []

        class Paced(PacedEngine):
            """Counts the time that slots decode."""

            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                self.busy, self.turns, self.active, self.at = 0.0, 0, 0, time.monotonic()
                engines.append(self)

            def count(self, change: int) -> None:
                now = time.monotonic()
                self.busy += self.active * (now - self.at)
                self.active, self.at = self.active + change, now

            def seconds(self, request: GroupRequest, sample: int, output: SampleOutput) -> float:
                return lognormal(seconds, random.Random(request.seeds[sample]))

            async def decode(self, request: GroupRequest, sample: int) -> SampleOutput:
                self.count(1)
                try:
                    output = await super().decode(request, sample)
                finally:
                    self.count(-1)
                self.turns += 1
                return output

        use(Paced)
        begin = Puller.start

        async def report(puller: Puller, journal: Journal) -> None:
            while True:
                [engine] = engines
                engine.count(0)
                opened = puller._slots - puller.free  # type: ignore[operator]
                journal.write(
                    at=time.time(),
                    busy=engine.busy,
                    turns=engine.turns,
                    open=opened,
                    waiting=puller.waiting,
                    own=time.process_time(),
                )
                await asyncio.sleep(0.5)

        def start(puller: Puller, *args: Any) -> None:
            begin(puller, *args)
            puller.report = asyncio.create_task(report(puller, journals[0]))  # type: ignore[attr-defined]

        journals: list[Journal] = []

        def loaded(spec: Any, *rest: Any) -> Any:
            journals.append(Journal(spec.run_directory, f"slots-{spec.worker_id}"))
            model = load(spec, *rest)
            model.engine = engines[-1]  # and not what records its samples
            return model

        worker.load, Puller.start = loaded, start  # type: ignore[method-assign]
    from rollout_workers.__main__ import main as work_on

    work_on()


@dataclass(frozen=True)
class Reading:
    """The sum over all workers at one time. at: seconds. busy: slot seconds. own: processor
    seconds of the workers."""

    at: float
    busy: float
    turns: int
    open: int
    waiting: int
    own: float


def readings(journals: Sequence[list[dict[str, Any]]]) -> list[Reading]:
    """One reading per line of the first worker, from when all workers have one."""
    found: list[Reading] = []
    positions = [0] * len(journals)
    for line in journals[0]:
        for n, journal in enumerate(journals):
            while positions[n] + 1 < len(journal) and journal[positions[n] + 1]["at"] <= line["at"]:
                positions[n] += 1
        rows = [journal[at] for journal, at in zip(journals, positions, strict=True)]
        if all(row["at"] <= line["at"] for row in rows):
            busy = sum(row["busy"] for row in rows)
            found.append(
                Reading(line["at"], busy, *(sum(row[name] for row in rows) for name in ("turns", "open", "waiting", "own")))
            )
    return found


def write_job(folder: Path, given: argparse.Namespace) -> Path:
    """Write the config and its files."""
    from rollout_testing.sim import policy

    folder.mkdir()
    policy.write_model(folder / "model")
    groups = given.episodes // GROUP
    rows = (json.dumps({"prompt": f"row {n}:"}) for n in range(groups))
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "episodes.py").write_text(Path(__file__).read_text())
    each, slots = 25, given.slots // given.workers
    path = folder / "job.toml"
    path.write_text(
        _CONFIG.format(
            turns=given.turns,
            seconds=given.seconds,
            # a group starts when one place is free, so up to seven more episodes are open
            concurrency=(MOST_OPEN * slots - GROUP + 1) / slots,
            group=GROUP,
            steps=groups // each,
            groups=each,
            slots=slots,
            workers=given.workers,
        )
    )
    return path


def processor(pid: int) -> float:
    """Seconds of user and system time; 0 for a process that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(folder: Path, given: argparse.Namespace) -> tuple[list[Reading], dict[str, list[tuple[float, float]]]]:
    """Run to the end. Returns the readings, and processor seconds over time of the services and of
    the environment."""
    from mesh import ENDED, ROOT, Mesh, describe

    from rollout.run.v1 import run_pb2
    from rollout_testing.processes import children
    from rollout_testing.sim import journal

    job = write_job(folder / "job", given)
    running = Mesh(
        folder / "state",
        arguments=("--worker-command", f"{sys.executable} {Path(__file__).resolve()} --work", "--worker-python", sys.executable),
        environment={"PYTHONPATH": str(ROOT / "python"), SETTINGS: str(given.seconds)},
    )
    spent: dict[str, list[tuple[float, float]]] = {"services": [], "environment": []}
    try:
        running.start()
        pid = running.processes["all"].pid
        run = running.submit(job)
        while running.status(run).run.state not in ENDED | {run_pb2.RUN_STATE_RUNNING}:
            time.sleep(0.5)
        began = time.monotonic()
        while (status := running.status(run)).run.state not in ENDED:
            if given.limit and time.monotonic() - began > given.limit:
                break
            players = [at for w in status.workers if w.kind == "inference" and w.pid for at in children(w.pid, "hosting.child")]
            spent["services"].append((time.time(), processor(pid)))
            spent["environment"].append((time.time(), sum(map(processor, players))))
            time.sleep(2)
        well = run_pb2.RUN_STATE_RUNNING if given.limit else run_pb2.RUN_STATE_SUCCEEDED
        assert status.run.state == well, describe(status) + "\n" + _logs(running, status.run.directory)
        lines = [journal.read(status.run.directory, f"slots-inference-{n}") for n in range(given.workers)]
        return readings(lines), spent
    finally:
        for process in running.processes.values():
            os.killpg(process.pid, 9)  # its state is discarded
            process.wait(30)


def _logs(running: Mesh, directory: str) -> str:
    logs = sorted(Path(directory, "workers").glob("*.log"))
    return "".join(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs) + running.log("all")


def between(series: list[tuple[float, float]], start: float, end: float) -> float:
    """How much a counter grew, from the readings nearest to both times."""

    def at(when: float) -> float:
        return min(series, key=lambda each: abs(each[0] - when))[1]

    return at(end) - at(start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--slots", type=int, default=400, help="of all engines")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="mean time of a decode, and of a thought")
    parser.add_argument("--limit", type=float, help="end the run after this many seconds; default: when all episodes have ended")
    parser.add_argument("--check", action="store_true", help="exit with code 1 if too few slots are busy")
    given = parser.parse_args()
    from record import recorded

    with recorded("episodes") as kept:
        with tempfile.TemporaryDirectory() as folder:
            series, spent = measure(Path(folder), given)
        most = max(reading.open for reading in series)
        full = next(n for n, reading in enumerate(series) if reading.open >= 0.99 * most)
        last = max(n for n, reading in enumerate(series) if reading.open >= 0.99 * most)
        inside = series[full : last + 1]
        start = inside[0]
        for reading in inside[1:]:
            if reading.at - start.at >= WINDOW:
                _print_window(start, reading, given.slots, inside[0].at)
                start = reading
        first, end = inside[0], inside[-1]
        turns, seconds = end.turns - first.turns, end.at - first.at
        busy = (end.busy - first.busy) / seconds / given.slots
        costs = {name: 1e6 * between(values, first.at, end.at) / turns for name, values in spent.items()}
        costs["workers"] = 1e6 * (end.own - first.own) / turns
        kept.update(busy=busy, open=most, slots=given.slots, turns=turns, seconds=seconds, microseconds_a_turn=costs)
        met = busy >= BAR and most <= MOST_OPEN * given.slots
        kept.update(bar=BAR, met=met)
        print(
            f"{100 * busy:.1f} % of {given.slots} slots busy over {seconds:.0f} s and {turns} turns, at most {most} episodes "
            f"open ({most / given.slots:.2f} per slot; bar: {100 * BAR:.0f} % with {MOST_OPEN})"
        )
        print("processor time per turn: " + ", ".join(f"{name} {cost:.0f} us" for name, cost in costs.items()))
    return int(given.check and not met)


def _print_window(start: Reading, end: Reading, slots: int, began: float) -> None:
    seconds = end.at - start.at
    print(
        f"{start.at - began:5.0f} s  {100 * (end.busy - start.busy) / seconds / slots:5.1f} % busy  "
        f"{(end.turns - start.turns) / seconds:6.1f} turns/s  {end.open:5} open  {end.waiting:3} groups waiting",
        flush=True,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        del sys.argv[1]
        work(sys.argv[1])
    else:
        sys.exit(main())
