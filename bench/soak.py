"""Makes many runs on one `rolloutd` that lives for all of them, and measures whether it grows.

    make bench-soak                                     # 300 runs, 1,000,000 samples, about 40 minutes
    make bench-soak RUNS=40 SAMPLES=60000 ARGS="--keep 4 --every 1"   # a small one
    make bench-soak ARGS=--discard                      # ends an interrupted one and deletes its state

The runs are asynchronous and synchronous ones in turn, with the simulated engine
(`rollout_testing.sim`), and the newest `KEEP` of them stay (`retention.ended_runs`). After every
few runs, when the older ones are deleted, the bench reads the daemon's resident memory, open files,
and threads, the files and bytes of the state folder, the rows of every table, and the daemon's
processor time per step, and prints a line. Processor time instead of wall time, because it depends
less on what else the machine does; that of the workers does not count.

At the end the first quarter of the lines after the warm-up is compared with the last one: each mean
may grow by 10 %, and by a small number of its unit, so that a table with five rows may get a sixth.
The exit code is 1 if one grows more.

A killed bench continues: its lines are in `.cache/soak/`, and the daemon lives on. If the daemon
was killed too it starts again on its state, and memory, files, and threads are compared from there.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import shutil
import signal
import sqlite3
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from mesh import ENDED, ROOT, Mesh, until
from record import recorded
from scale import processor, resident
from sim import Job, edit, sim_mesh

from rollout.run.v1 import run_pb2

FOLDER = ROOT / ".cache" / "soak"
GROUPS, SAMPLES = 24, 8
MOST_GROWTH = 1.1
OF_THE_PROCESS = ("memory", "open files", "threads")
SLACK = {"memory": 8 << 20, "open files": 4, "threads": 3, "files": 16, "bytes": 4 << 20, "rows": 16, "processor": 0.0}
"""What each figure may grow by in addition, in its unit; rows of each table."""
REFUSED = ".fence_deleted"
"""The tables whose rows are deleted runs."""
ENOUGH = 4
"""The lines that a quarter must have."""


def kind(figure: str) -> str:
    """The entry of SLACK for a figure."""
    return figure if figure in SLACK else "rows"


@dataclass
class Lines:
    """The figures after every few runs, in a file that is appended to."""

    path: Path
    rows: list[dict]

    @classmethod
    def load(cls, path: Path) -> Lines:
        if not path.exists():
            return cls(path, [])
        whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return cls(path, [json.loads(line) for line in whole])

    def add(self, row: dict) -> None:
        self.rows.append(row)
        staging = self.path.with_suffix(".tmp")
        staging.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        staging.rename(self.path)


def write(folder: Path, steps: int, mode: str) -> Path:
    """The configuration of a run of this mode."""
    path = Job(folder / mode, steps=steps, mode=mode, staleness=2 if mode == "async" else 0, workers=1, snapshot=5).write()
    edit(path, groups_per_step=GROUPS, group_size=SAMPLES, slots=64)
    rows = [json.dumps({"prompt": f"line {n}:"}) for n in range(GROUPS * steps)]  # `row 7:` is a failure of the reward
    (path.parent / "train.jsonl").write_text("\n".join(rows) + "\n")
    return path


def alive(pid: int) -> bool:
    """Whether the process is a daemon that has not exited."""
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" and Path(f"/proc/{pid}/exe").resolve().name == "rolloutd"
    return False


def daemon(keep: int) -> tuple[Mesh, int]:
    """The daemon of an earlier bench, or a new one, and its process."""
    running = sim_mesh(FOLDER / "state", arguments=("--retention-ended-runs", str(keep), "--log-level", "warn"))
    pid = FOLDER / "pid"
    if pid.exists() and alive(int(pid.read_text())) and running.serves("all"):
        return running, int(pid.read_text())
    running.start()
    pid.write_text(str(running.processes["all"].pid))
    return running, running.processes["all"].pid


def end(pid: int) -> None:
    """Stop the daemon and its workers, and wait."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    until(lambda: not alive(pid), "rolloutd to stop", 120)


def tables(state: Path) -> dict[str, int]:
    """The rows of each table."""
    found = {}
    for path in sorted(state.rglob("*.sqlite")):
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=60)) as database:
            for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                found[f"{path.stem}.{table}"] = database.execute(f'SELECT count(*) FROM "{table}"').fetchone()[0]
    return found


def size(state: Path) -> tuple[int, int]:
    """Files and bytes of a folder, while files are removed. Bytes on the disk, without the logs of
    SQLite, which grow to 4 MB each and stay so: those of quiet databases take hours."""
    files = used = 0
    for folder, _, names in os.walk(state):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                if not name.endswith("-wal"):
                    used += 512 * os.lstat(os.path.join(folder, name)).st_blocks
                files += 1
    return files, used


def measure(running: Mesh, pid: int, deleted: int) -> dict[str, float]:
    """The figures after so many deleted runs. Each service refuses what arrives for a deleted run
    for 30 days, with one row of `fence_deleted`: only further rows of that table are counted."""
    files, used = size(running.state)
    rows = {name: count - deleted if name.endswith(REFUSED) else count for name, count in tables(running.state).items()}
    return {
        "memory": resident(pid),
        "open files": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
        "files": files,
        "bytes": used,
        **rows,
    }


def listed(running: Mesh) -> list[run_pb2.Run]:
    return list(running.scheduler.ListRuns(run_pb2.ListRunsRequest(page_size=1000)).runs)


def make(running: Mesh, lock: bytes, folder: Path) -> run_pb2.Run:
    """Make one run, which must succeed."""
    created = running.scheduler.CreateRun(run_pb2.CreateRunRequest(lock=lock, base_dir=str(folder))).run
    return running.finish(created.run_id)


def settled(running: Mesh, keep: int) -> bool:
    """Whether the older runs are deleted."""
    return len(listed(running)) <= keep


def cancel_left(running: Mesh) -> None:
    """Cancel what a killed bench has left."""
    for run in listed(running):
        if run.state not in ENDED:
            running.scheduler.CancelRun(run_pb2.CancelRunRequest(run_id=run.run_id))
            running.scheduler.GetRun(run_pb2.GetRunRequest(run_id=run.run_id))
    until(lambda: all(run.state in ENDED for run in listed(running)), "the runs of a killed bench to end", 120)


def growth(rows: list[dict], figure: str) -> tuple[float, float] | None:
    """The means of the first and of the last quarter; None: too few lines."""
    if figure in OF_THE_PROCESS:
        rows = [row for row in rows if row["daemon"] == rows[-1]["daemon"]]
    quarter = len(rows) // 4
    if quarter < ENOUGH:
        return None
    first, last = rows[:quarter], rows[-quarter:]
    return tuple(sum(row["figures"].get(figure, 0) for row in part) / quarter for part in (first, last))  # type: ignore[return-value]


def show(figure: str, value: float) -> str:
    match figure:
        case "memory" | "bytes":
            return f"{value / 2**20:.1f} MB"
        case "processor":
            return f"{1e3 * value:.2f} ms"
    return f"{value:,.0f}"


def judge(lines: Lines, warm: int, kept: dict) -> bool:
    """Print what has grown. Whether everything is flat."""
    rows = [row for row in lines.rows if row["runs"] > warm]
    figures = dict.fromkeys(name for row in rows for name in row["figures"])
    flat = True
    print(f"\n{'':28} {'first quarter':>14} {'last quarter':>14}")
    for figure in figures:
        means = growth(rows, figure)
        if means is None:
            print(f"{figure:28} too few lines after the warm-up of {warm} runs, or since the daemon started last")
            flat = False
            continue
        first, last = means
        grows = last > MOST_GROWTH * first and last - first > SLACK[kind(figure)]
        kept[figure] = {"first": first, "last": last, "flat": not grows}
        flat = flat and not grows
        if grows or kind(figure) != "rows" or max(first, last) > SLACK["rows"]:
            print(f"{figure:28} {show(figure, first):>14} {show(figure, last):>14}  {'GROWS' if grows else 'flat'}")
    starts = len(dict.fromkeys(row["daemon"] for row in lines.rows))
    if starts > 1:
        print(f"the daemon was started {starts} times; {', '.join(OF_THE_PROCESS)} are compared since the last start")
    return flat


def soak(options: argparse.Namespace, kept: dict) -> bool:
    steps = max(2, -(-options.samples // (options.runs * GROUPS * SAMPLES)))
    settings = {"runs": options.runs, "steps": steps, "keep": options.keep, "every": options.every, "at_once": options.at_once}
    described = FOLDER / "settings.json"
    if described.exists() and json.loads(described.read_text()) != settings:
        sys.exit(f"{FOLDER} has an interrupted bench with other settings; `make bench-soak ARGS=--discard` deletes it")
    FOLDER.mkdir(parents=True, exist_ok=True)
    described.write_text(json.dumps(settings))
    lines = Lines.load(FOLDER / "lines.jsonl")
    done = lines.rows[-1]["runs"] if lines.rows else 0
    running, pid = daemon(options.keep)
    if done:
        print(f"continues after {done} of {options.runs} runs, rolloutd is process {pid}")
    cancel_left(running)
    configs = [write(FOLDER, steps, mode) for mode in ("sync", "async")]
    locks = [running.plan(config) for config in configs]
    a_run = steps * GROUPS * SAMPLES
    print(f"{options.runs} runs of {steps} steps with {a_run:,} samples each; the newest {options.keep} stay", flush=True)
    spent, began = processor(pid), time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:
        while done < options.runs:
            now = range(done, min(options.runs, done + options.every))
            list(pool.map(lambda n: make(running, locks[n % 2], configs[n % 2].parent), now))
            until(lambda: settled(running, options.keep), "that older runs are deleted", 120)
            done = now.stop
            used, took = processor(pid), time.monotonic() - began
            figures = measure(running, pid, done - len(listed(running)))
            figures["processor"] = (used - spent) / (len(now) * steps)
            lines.add({"runs": done, "daemon": pid, "seconds": took, "figures": figures})
            rows = sum(count for name, count in figures.items() if kind(name) == "rows")
            print(
                f"{done:5} runs  {done * a_run:9,} samples  {show('memory', figures['memory'])}  {figures['open files']} open  "
                f"{figures['threads']} threads  {figures['files']:,} files  {show('bytes', figures['bytes'])}  {rows:,} rows  "
                f"{show('processor', figures['processor'])} a step  {took:.0f} s",
                flush=True,
            )
            spent, began = processor(pid), time.monotonic()
    flat = judge(lines, options.warm or max(2 * options.keep, options.runs // 10), kept)
    kept.update(runs=options.runs, samples=options.runs * a_run, met=flat, lines=lines.rows)
    end(pid)
    shutil.rmtree(FOLDER)
    print("flat" if flat else f"NOT FLAT: a figure of the last quarter is more than {MOST_GROWTH} times that of the first")
    return flat


def discard() -> None:
    pid = FOLDER / "pid"
    if pid.exists() and alive(int(pid.read_text())):
        end(int(pid.read_text()))
    shutil.rmtree(FOLDER, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--samples", type=int, default=1_000_000, help="of all runs, rounded up to whole steps")
    parser.add_argument("--keep", type=int, default=12, help="runs that stay")
    parser.add_argument("--every", type=int, default=4, help="runs from one line to the next")
    parser.add_argument("--at-once", type=int, default=2, help="runs at the same time")
    parser.add_argument("--warm", type=int, default=0, help="runs of the warm-up; 0: twice those that stay, at least a tenth")
    parser.add_argument("--discard", action="store_true", help="end an interrupted bench and delete its state")
    options = parser.parse_args()
    if options.discard:
        discard()
        return 0
    with recorded("soak") as kept:
        return 0 if soak(options, kept) else 1


if __name__ == "__main__":
    sys.exit(main())
