"""Random kills of a running job without a model: `make chaos KILLS=n SEED=s SHAPE=embedded|servers`.

A round is one run that is disturbed a few times: kill -9 or SIGSTOP of a control plane's process or of a worker, at random
moments, in recovery too. After the round `rollout audit` must pass, the weights must be those of an undisturbed run, and the
ledger must agree with what learner and engines wrote down themselves. What was done is kept after each round, so that a harness
that was interrupted goes on where it stopped.

    embedded   one rolloutd hosts everything
    servers    one rolloutd a service, and one for NATS and the registry
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from mesh import ENDED, SERVICES, Mesh, describe
from sim import Job, audited, journals_agree, sim_mesh, stop, submit

from rollout.run.v1 import run_pb2

KILLS_A_ROUND = 5
STALLED_SECONDS = 240.0


@dataclass
class Tally:
    """What was done so far; a file."""

    path: Path
    reference: str = ""
    rounds: int = 0
    kills: int = 0
    seconds: float = 0.0
    by_victim: Counter[str] = field(default_factory=Counter)
    figures: Counter[str] = field(default_factory=Counter)

    @classmethod
    def load(cls, path: Path) -> Tally:
        if not path.exists():
            return cls(path)
        kept = json.loads(path.read_text())
        return cls(path, **{**kept, "by_victim": Counter(kept["by_victim"]), "figures": Counter(kept["figures"])})

    def save(self) -> None:
        kept = {name: getattr(self, name) for name in ("reference", "rounds", "kills", "seconds", "by_victim", "figures")}
        staging = self.path.with_suffix(".tmp")
        staging.write_text(json.dumps(kept, indent=1))
        staging.rename(self.path)


class Disturber:
    """Picks victims of one run and hurts them. Whatever it stopped or killed it brings back."""

    def __init__(self, running: Mesh, run: str, dice: random.Random) -> None:
        self.running, self.run, self.dice = running, run, dice
        self.done: Counter[str] = Counter()

    def disturb(self) -> None:
        """One kill or stop of a random victim."""
        workers = self._workers()
        planes = list(self.running.processes)
        victim = self.dice.choice(planes if not workers or self.dice.random() < 0.5 else workers)
        stopping = self.dice.random() < 0.3
        name = victim if isinstance(victim, str) else victim[0]
        pid = self.running.processes[victim].pid if isinstance(victim, str) else victim[1]
        with contextlib.suppress(ProcessLookupError):
            if stopping:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(self.dice.uniform(0.05, 6.0))
                os.kill(pid, signal.SIGCONT)
            else:
                os.kill(pid, signal.SIGKILL)
        if isinstance(victim, str) and not stopping:
            self.running.processes[victim].wait(10)
            time.sleep(self.dice.uniform(0, 0.5))
            self._start(victim)
        self.done[f"{'SIGSTOP' if stopping else 'kill -9'} {name}"] += 1

    def _start(self, name: str) -> None:
        if name in SERVICES:
            self.running.start_service(name)
        elif name == "servers":
            self.running.start_servers()
        else:
            self.running.start()

    def _workers(self) -> list[tuple[str, int]]:
        with contextlib.suppress(grpc.RpcError, OSError, KeyError, ValueError):
            return [(w.worker_id, w.pid) for w in status(self.running, self.run).workers if w.pid]
        return []


def status(running: Mesh, run: str) -> run_pb2.RunStatus:
    return running.scheduler.GetRun(run_pb2.GetRunRequest(run_id=run), timeout=10).status


def survive(running: Mesh, job: Job, lock: bytes, kills: int, dice: random.Random) -> tuple[str, Counter[str]]:
    """One run with so many disturbances. Returns its id and what was done to it."""
    run = submit(running, lock, job)
    disturber = Disturber(running, run, dice)
    due, moved, step = time.monotonic() + dice.uniform(0, 3), time.monotonic(), 0
    while True:
        now = time.monotonic()
        if kills and now >= due:
            disturber.disturb()
            kills -= 1
            due = time.monotonic() + dice.choice((dice.uniform(0, 0.3), dice.uniform(0.5, 6)))  # in recovery, or in work
            moved = time.monotonic()
        seen = None
        with contextlib.suppress(grpc.RpcError, OSError, KeyError, ValueError):
            seen = status(running, run)
            if seen.run.state == run_pb2.RUN_STATE_INTERRUPTED:
                running.scheduler.ResumeRun(run_pb2.ResumeRunRequest(run_id=run), timeout=10)
                continue
        if seen is not None and seen.run.step > step:
            step, moved = seen.run.step, now
        if seen is not None and seen.run.state == run_pb2.RUN_STATE_SUCCEEDED:
            return run, disturber.done
        if seen is not None and seen.run.state in ENDED:
            raise AssertionError(describe(seen))
        if now - moved > STALLED_SECONDS:
            raise AssertionError(f"nothing moved for {STALLED_SECONDS:.0f} s: {describe(seen) if seen else 'no answer'}")
        time.sleep(0.05)


def main() -> int:
    """Go on until so many kills were survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shape", choices=("embedded", "servers"), default="embedded")
    parser.add_argument("--folder", type=Path, help="where everything lies (default: .cache/chaos/<shape>-<seed>)")
    given = parser.parse_args()
    folder = (given.folder or Path(".cache/chaos") / f"{given.shape}-{given.seed}").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    tally = Tally.load(folder / "tally.json")
    if tally.kills:
        print(f"going on after {tally.kills} kills in {tally.rounds} rounds")
    job = Job(folder / "job", steps=30)
    config = job.write()
    (job.folder / "tried").unlink(missing_ok=True)
    shutil.rmtree(folder / "state", ignore_errors=True)
    running = sim_mesh(folder / "state", "all" if given.shape == "embedded" else "seven", seconds=0.1)
    try:
        running.start()
        lock = running.plan(config)
        if not tally.reference:
            run, _ = survive(running, job, lock, 0, random.Random(0))
            tally.reference = status(running, run).run.weights_digest
            audited(running, run)
            tally.save()
            print(f"undisturbed: {tally.reference}", flush=True)
        while tally.kills < given.kills:
            began = time.monotonic()
            dice = random.Random(f"{given.seed}/{tally.rounds}")
            run, done = survive(running, job, lock, min(KILLS_A_ROUND, given.kills - tally.kills), dice)
            digest = status(running, run).run.weights_digest
            if digest != tally.reference:
                raise AssertionError(f"{run} ended with {digest}, undisturbed it is {tally.reference}")
            report = audited(running, run)
            figures = Counter(journals_agree(running, run, job))
            figures.update({"twins_dropped": report["counts"]["twins_dropped"], "infra_failed": report["counts"]["infra_failed"]})
            tally.rounds += 1
            tally.kills += done.total()
            tally.seconds += time.monotonic() - began
            tally.by_victim += done
            tally.figures += figures
            tally.save()
            print(
                f"round {tally.rounds}: {done.total()} kills in {time.monotonic() - began:.0f} s, same weights; {dict(done)}",
                flush=True,
            )
        running.stop()
    except BaseException:
        print(f"round {tally.rounds + 1} of seed {given.seed} failed; everything is left in {folder}", file=sys.stderr)
        raise
    finally:
        stop(running)
    told(tally, given.shape, given.seed)
    return 0


def told(tally: Tally, shape: str, seed: int) -> None:
    """The figures."""
    print(f"\n{shape}, seed {seed}: {tally.kills} kills in {tally.rounds} runs, {tally.seconds:.0f} s")
    for name, count in sorted(tally.by_victim.items()):
        print(f"  {count:5} {name}")
    f = tally.figures
    print(f"  {f['steps']} steps committed ({f['steps_made']} made), {f['trained']} samples trained ({f['sampled']} sampled)")
    print(f"  {f['excluded']} groups excluded for a reason, {f['infra_failed']} samples failed, {f['twins_dropped']} twins")
    print("  0 lost, 0 twice, 0 partial groups, every digest equal to the undisturbed run's")


if __name__ == "__main__":
    sys.exit(main())
