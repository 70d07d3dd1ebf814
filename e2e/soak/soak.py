"""``make soak-sessions``: sessions of a run without a model (`rollout_testing.sim`), while
inference workers are killed and weights change with each step. See main.go."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import grpc
from mesh import ENDED, Mesh, describe, until
from sim import Job, edit, sim_mesh, stop

from rollout.inference.v1 import inference_pb2
from rollout.run.v1 import run_pb2

GROUPS, SAMPLES = 8, 8


def write(folder: Path, sessions: int, workers: int) -> Path:
    """The config of a run whose samples are the sessions."""
    job = Job(folder, workers=workers, mode="async", staleness=8, keep_payloads=True, snapshot=0, agents=True)
    path = job.write()
    steps = sessions // (GROUPS * SAMPLES)
    edit(path, steps=steps, groups_per_step=GROUPS, group_size=SAMPLES, slots=64, max_model_len=512)
    path.write_text(path.read_text().replace("group_attempts = 20", "group_attempts = 20\nagent_seconds = 600"))
    (folder / "train.jsonl").write_text("".join(json.dumps({"prompt": f"row {n}:"}) + "\n" for n in range(steps * GROUPS)))
    return path


class Killer:
    """Kills an inference worker every few seconds."""

    def __init__(self, running: Mesh, run: str, seed: int, every: float) -> None:
        self.running, self.run, self.rand, self.every = running, run, random.Random(seed), every
        self.kills = 0
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._kill)

    def _kill(self) -> None:
        while not self.ended.wait(self.every):
            workers = [w for w in self.running.status(self.run).workers if w.kind == "inference" and w.pid and w.address]
            if len(workers) > 1:
                with contextlib.suppress(ProcessLookupError):  # it has exited since
                    os.kill(self.rand.choice(workers).pid, signal.SIGKILL)
                    self.kills += 1

    def __enter__(self) -> Killer:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()


def idle(running: Mesh, run: str) -> bool:
    """Whether no inference worker has a request."""
    for worker in running.status(run).workers:
        if worker.kind == "inference" and worker.address:
            try:
                status = running.inference(run, worker.address).GetInferenceStatus(inference_pb2.GetInferenceStatusRequest())
            except grpc.RpcError:
                return False  # it starts again
            if status.active:
                return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=10_000, help="sessions, rounded up to whole steps of 64")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1, 2**32), help="of clients and kills")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kill-every", type=float, default=5.0, help="seconds between two kills")
    parser.add_argument("--client", required=True, help="the program of main.go")
    options = parser.parse_args()
    sessions = -(-options.sessions // (GROUPS * SAMPLES)) * GROUPS * SAMPLES
    with tempfile.TemporaryDirectory() as folder:
        running = sim_mesh(Path(folder, "state"), seconds=0.02)
        running.state.mkdir()
        try:
            running.start()
            config = write(Path(folder, "job"), sessions, options.workers)
            run = running.submit(config)
            until(lambda: started(running, run), "the workers", 120)
            daemon = running.daemon()
            flags = ["--seed", str(options.seed), "--sessions", str(sessions)]
            with Killer(running, run, options.seed, options.kill_every) as killer:
                played = subprocess.run(
                    [options.client, *flags, str(daemon["grpc"]), str(daemon["token_file"]), run], check=False
                )
            until(lambda: idle(running, run) or running.status(run).run.state in ENDED, "free slots", 60)
            print(f"{killer.kills} workers were killed; every slot is free", flush=True)
            if played.returncode:  # sessions that failed are not closed, so the run would not end
                sys.exit(played.returncode)
            begun = time.monotonic()
            until(lambda: running.status(run).run.state in ENDED, "the end of the run", 300)
            status = running.status(run)
            print(f"the run ended {time.monotonic() - begun:.0f} s later, at weights version {status.run.step}")
            assert status.run.state == run_pb2.RUN_STATE_SUCCEEDED, describe(status)
            running.stop()
        finally:
            stop(running)


def started(running: Mesh, run: str) -> bool:
    status = running.status(run)
    assert status.run.state not in ENDED, describe(status)
    return status.run.state == run_pb2.RUN_STATE_RUNNING


if __name__ == "__main__":
    main()
