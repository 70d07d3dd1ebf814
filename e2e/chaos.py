"""Random faults during a job: `make chaos KILLS=n SEED=s SHAPE=embedded|servers AGENTS=0|1`.

Each round is one run with a few faults at random moments, also during recovery and during earlier
faults (``faults``). After the round `rollout audit` must pass, the weights must equal those of a
run without faults, and the ledger must agree with the journals of the learner and the engines. The
results are stored after each round, so an interrupted test resumes where it stopped.

    embedded   one rolloutd hosts everything
    servers    one rolloutd per service and a replica of scheduler, buffer and controller, on PostgreSQL, Consul, a NATS
               cluster and S3, with every connection between them through a proxy. PostgreSQL has a synchronous standby,
               which is promoted when the primary is lost with its data

With ASYNC=1 the run is asynchronous, so its weights depend on timing. Instead of comparing them
with a run without faults, the recorded batches are trained again (`rollout replay`), and each step
must have the recorded weights. With TORCH=1 too, no bits are promised: the audit checks the
lineages of the weights instead.

With AGENTS=1 the samples are episodes of several turns of an environment that runs commands in
sandboxes. Its processes are killed, stopped, and hang, and the sandboxes are killed. An episode
that they interrupt must be played again, and never be scored.

With MULTISTEP=1 a small policy acts in environments of three environment workers, which get faults
too; each run is also trained again from its episodes (`rollout replay`).

With TORCH=1 the workers use the addition example's untrained model. They write no journals, so only
the ledger shows whether each prompt was consumed once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from acting import ActingJob
from faults import KINDS, Faults
from mesh import ENDED, Mesh, describe
from model import ModelJob
from production import PACE, Production
from recording import ids_agree
from sim import Job, audited, audited_offline, replay, sim_mesh, submit

from rollout.run.v1 import run_pb2

FAULTS_A_ROUND = {"embedded": 5, "servers": 10}
FAULTS_OF_AGENTS = 20
"""Faults of a round with episodes of several turns, which takes longer."""
FAULTS_OF_ACTING = 10
STALLED_SECONDS = 400.0
TORCH_STALLED_SECONDS = 900.0
"""Time limits are long, because on a busy machine a worker imports torch for minutes, and again
after each kill."""
UNTOUCHED = random.Random(0)


@dataclass
class Tally:
    """The counts so far, which are stored in a file."""

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

    def workers_killed(self) -> int:
        """The number of faults that killed a worker."""
        killed = re.compile(r"kill -9 (inference|learner|reward|environment)-\d+")
        return sum(count for name, count in self.by_victim.items() if killed.fullmatch(name))

    def print(self, shape: str, seed: int, asynchronous: bool) -> None:
        print(f"\n{shape}, seed {seed}: {self.kills} faults in {self.rounds} runs, {self.seconds:.0f} s")
        for name, count in sorted(self.by_victim.items()):
            print(f"  {count:5} {name}")
        f = self.figures
        made, sampled = f" ({f['steps_made']} made)", f" ({f['sampled']} sampled)"
        if not f["sampled"]:  # with a real model, whose workers write no journal
            made = sampled = ""
        print(f"  {f['steps']} steps committed{made}, {f['trained']} samples trained{sampled}")
        print(
            f"  {f['excluded']} groups excluded for a reason, {f['infra_failed']} samples failed, "
            f"{f['duplicates_dropped']} duplicates"
        )
        if f["lineages"]:
            print(f"  {f['lineages']} lineages of weights that were lost and retrained with other bits")
        if f["turns"]:
            print(f"  {f['turns']} turns trained, each with the ids that an engine returned")
        digests = "equal to the undisturbed run's"
        if asynchronous:
            digests = "reached again by replay" if f["sampled"] else "in the chain of the ledger"
        print(f"  0 samples lost, 0 trained twice, 0 partial groups, every digest {digests}")


def survive(
    running: Mesh, faults: Faults, lock: bytes, job: Job | ModelJob | ActingJob, kills: int, dice: random.Random
) -> tuple[str, Counter[str]]:
    """Make one run with this many faults. Returns its id and the faults."""
    run = submit(running, lock, job)
    faults.begin(run, dice)
    due, moved, step, seen = time.monotonic() + dice.uniform(0, 3), time.monotonic(), 0, None
    while True:
        now = time.monotonic()
        if faults.total() < kills and now >= due:
            moved = now if faults.strike() else moved
            due = now + dice.choice((dice.uniform(0, 0.3), dice.uniform(0.5, 6)))  # during recovery or during work
        faults.fix()
        with contextlib.suppress(grpc.RpcError, OSError, KeyError, ValueError):
            seen = running.scheduler.GetRun(run_pb2.GetRunRequest(run_id=run), timeout=3).status
            faults.see(seen)
            if seen.run.state == run_pb2.RUN_STATE_INTERRUPTED and running.shape == "all":  # replicas resume without a command
                running.scheduler.ResumeRun(run_pb2.ResumeRunRequest(run_id=run), timeout=10)
                continue
            if seen.run.step > step:
                step, moved = seen.run.step, now
            if seen.run.state == run_pb2.RUN_STATE_SUCCEEDED:
                return run, faults.end()
            if seen.run.state in ENDED - {run_pb2.RUN_STATE_INTERRUPTED}:
                raise AssertionError(describe(seen))
        timeout = STALLED_SECONDS if isinstance(job, Job) else TORCH_STALLED_SECONDS
        if now - moved > timeout:
            raise AssertionError(f"no progress for {timeout:.0f} s: {describe(seen) if seen else 'no answer'}")
        time.sleep(0.05)


def check(running: Mesh, run: str, job: Job | ModelJob | ActingJob, reference: str) -> Counter[str]:
    """Check the results of a run. Returns its figures."""
    digest = running.status(run).run.weights_digest
    asynchronous = job if isinstance(job, Job) and job.mode == "async" else None
    if reference and job.mode == "sync" and digest != reference:
        raise AssertionError(f"{run} ended with the digest {digest}, but without faults it is {reference}")
    report = audited(running, run)
    assert report["weights_digest"] == digest, f"the run ended with {digest}, the ledger with {report['weights_digest']}"
    if running.config:
        offline = audited_offline(running, run)
        assert offline == report, f"the audit without the services found {offline}, with them {report}"
    if asynchronous:
        replayed = replay(running, run)
        assert replayed["same"] and replayed["steps"][-1]["step"] == asynchronous.steps, replayed
    figures = Counter(job.agree(running, run))
    if isinstance(job, Job) and job.turns:
        figures["turns"] = ids_agree(running, run)[1]
    figures.update({name: report["counts"][name] for name in ("duplicates_dropped", "infra_failed")})
    figures["lineages"] += len(report["lineages"])
    return figures


def main() -> int:
    """Make runs until they have survived this many faults."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # raised as an exception, so that all processes are stopped
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shape", choices=("embedded", "servers"), default="embedded")
    parser.add_argument("--torch", type=int, choices=(0, 1), default=0, help="1: workers with a real model")
    parser.add_argument("--asynchronous", type=int, choices=(0, 1), default=0, help="1: an asynchronous run, which is replayed")
    parser.add_argument("--agents", type=int, choices=(0, 1), default=0, help="1: episodes of several turns, with sandboxes")
    parser.add_argument("--multistep", type=int, choices=(0, 1), default=0, help="1: a policy that acts in environment workers")
    parser.add_argument("--faults", nargs="*", choices=KINDS, help="only these kinds of faults (default: all)")
    parser.add_argument("--folder", type=Path, help="folder for all files (default: .cache/chaos/<shape>-<seed>)")
    given = parser.parse_args()
    name = f"{given.shape}-{given.seed}" + ("-torch" if given.torch else "") + ("-async" if given.asynchronous else "")
    name += "-agents" if given.agents else ""
    name += "-multistep" if given.multistep else ""
    name += "".join(f"-{kind}" for kind in given.faults or ())
    folder = (given.folder or Path(".cache/chaos") / name).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    tally = Tally.load(folder / "tally.json")
    if tally.kills:
        print(f"continuing after {tally.kills} faults in {tally.rounds} rounds")
    shutil.rmtree(folder / "state", ignore_errors=True)
    if given.torch and given.agents:
        parser.error("TORCH=1 excludes AGENTS=1: the run with a real model has one turn")
    if given.multistep and (given.torch or given.agents or given.asynchronous):
        parser.error("MULTISTEP=1 excludes TORCH=1, AGENTS=1, and ASYNC=1: its run is a deterministic one of a policy")
    asynchronous: dict[str, Any] = {"mode": "async", "staleness": 2, "keep_payloads": True} if given.asynchronous else {}
    agents: dict[str, Any] = {"turns": True, "boxes": True, "keep_payloads": True} if given.agents else {}
    job: Job | ModelJob | ActingJob = (
        ActingJob(folder / "job")
        if given.multistep
        else ModelJob("async" if given.asynchronous else "sync")
        if given.torch
        else Job(folder / "job", steps=30, **(asynchronous | agents))
    )
    for name in ("tried", "hang", "hung"):
        (job.folder / name).unlink(missing_ok=True)
    shape = "all" if given.shape == "embedded" else "replicas"
    state = folder / "state"
    place = state if shape == "all" else state / "mesh"
    running = Mesh(place, shape) if given.torch or given.multistep else sim_mesh(place, shape, seconds=PACE)
    with Production(state, running) as production:
        try:
            go_on(production, job, tally, given)
        except BaseException:
            print(f"round {tally.rounds + 1} of seed {given.seed} failed; see the files in {folder}", file=sys.stderr)
            raise
    workers = "a policy" if given.multistep else "torch" if given.torch else "no model"
    tally.print(f"{given.shape}, {workers}", given.seed, bool(given.asynchronous))
    if given.kills and not given.faults and not tally.workers_killed():
        print(f"no worker was killed in {tally.kills} faults: run more faults (KILLS=n) or another SEED", file=sys.stderr)
        return 1
    return 0


def go_on(production: Production, job: Job | ModelJob | ActingJob, tally: Tally, given: argparse.Namespace) -> None:
    running, faults = production.running, Faults(production, job.folder if given.agents else None, given.faults or KINDS)
    lock = job.plan(running)
    if not tally.reference:
        run, _ = survive(running, faults, lock, job, 0, UNTOUCHED)
        check(running, run, job, "")
        tally.reference = running.status(run).run.weights_digest
        tally.save()
        print(f"undisturbed: {tally.reference}", flush=True)
    while tally.kills < given.kills:
        began, dice = time.monotonic(), random.Random(f"{given.seed}/{tally.rounds}")
        a_round = FAULTS_OF_AGENTS if given.agents else FAULTS_OF_ACTING if given.multistep else FAULTS_A_ROUND[given.shape]
        most = min(a_round, given.kills - tally.kills)
        run, done = survive(running, faults, lock, job, most, dice)
        tally.figures += check(running, run, job, tally.reference)
        seconds = time.monotonic() - began
        tally.rounds += 1
        tally.kills += done.total()
        tally.seconds += seconds
        tally.by_victim += done
        tally.save()
        same = "the same weights by replay" if given.asynchronous else "same weights"
        same = "the weights of the ledger" if given.asynchronous and given.torch else same
        print(f"round {tally.rounds}: {done.total()} faults in {seconds:.0f} s, {same}; {dict(done)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
