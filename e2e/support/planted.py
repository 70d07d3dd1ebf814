"""Stalls that are planted in running jobs, and what `rollout explain` says of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh import ROOT, Mesh, until
from sim import Job, sim_mesh, stop, submit

from rollout.run.v1 import run_pb2


def explained(running: Mesh, run: str, *arguments: str) -> dict[str, Any]:
    """The explanation as JSON."""
    command = [str(ROOT / "bin" / "rollout"), "--format", "json", "explain", run, *arguments]
    if "servers" in running.frozen:  # no registry tells where the services are
        daemon = running.daemon()
        command += ["--server", str(daemon["grpc"]), "--token-file", str(daemon["token_file"])]
    elif running.shape == "all":
        command += ["--state-dir", str(running.state)]
    else:
        daemon = running.daemon()
        command += ["--consul", str(daemon["consul"]), "--token-file", str(daemon["token_file"])]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert outcome.returncode == 0, f"{outcome.returncode}: {outcome.stdout[-3000:]}{outcome.stderr[-3000:]}"
    return json.loads(outcome.stdout)


def chain(found: dict[str, Any]) -> str:
    """The chain as text, for messages."""
    return "\n".join(f"{wait['owner']} {wait['reason']}: {wait['evidence']}" for wait in found.get("chain", ()))


@dataclass(frozen=True)
class Stalled:
    """A running job."""

    running: Mesh
    run: str
    folder: Path

    def worker(self, name: str) -> run_pb2.Worker:
        return next(w for w in self.running.status(self.run).workers if w.worker_id == name)

    def explained(self) -> dict[str, Any]:
        return explained(self.running, self.run)

    def root(self, is_root: Callable[[dict[str, Any]], bool], what: str, seconds: float = 30) -> dict[str, Any]:
        """The last wait of the chain as soon as it is the expected one; an error has the chain."""
        found: dict[str, Any] = {}

        def named() -> bool:
            found.clear()
            found.update(self.explained())
            return bool(found.get("chain")) and is_root(found["chain"][-1])

        with contextlib.suppress(AssertionError):
            until(named, what, seconds)
        assert found.get("chain"), found
        assert is_root(found["chain"][-1]), f"{what}:\n{chain(found)}"
        return found["chain"][-1]

    def continues(self) -> None:
        """Wait until the run makes another step."""
        step = self.running.status(self.run).run.step
        until(lambda: self.running.status(self.run).run.step > step, "the run to continue", 60)


@contextlib.contextmanager
def job_of(
    job: Job, state: Path, shape: str = "all", steps: int = 1, edit: Callable[[Path], None] = lambda _: None, **settings: Any
) -> Iterator[Stalled]:
    """A job that has made some steps. edit: changes the files of the job, given its config."""
    running = sim_mesh(state, shape, **{"seconds": 0.02, **settings})
    running.start()
    try:
        config = job.write()
        edit(config)
        run = submit(running, running.plan(config), job)
        if steps:
            running.until_step(run, steps)
        yield Stalled(running, run, job.folder)
    finally:
        for process in running.processes.values():
            process.send_signal(signal.SIGCONT)
        stop(running)


def children(pid: int) -> list[int]:
    """The child processes of a process."""
    try:
        return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    except OSError:  # it has ended
        return []


Processes = dict[int, tuple[str, str]]
"""The start time and the command of each process by id."""


def descendants(pids: list[int]) -> Processes:
    """All processes that these started."""
    found: Processes = {}
    for child in [child for pid in pids for child in children(pid)]:
        with contextlib.suppress(OSError):
            found[child] = _identity(child)
        found |= descendants([child])
    return found


def alive(processes: Processes) -> Processes:
    """Those that have not ended."""
    return {pid: known for pid, known in processes.items() if _is(pid, known[0])}


def _is(pid: int, started: str) -> bool:
    try:
        ended = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return not ended and _identity(pid)[0] == started
    except OSError:
        return False


def _identity(pid: int) -> tuple[str, str]:
    started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return started, Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")


@contextlib.contextmanager
def flag(path: Path, text: str = "") -> Iterator[None]:
    """A file that exists inside the block."""
    path.write_text(text)
    try:
        yield
    finally:
        path.unlink()


@contextlib.contextmanager
def stopped(stalled: Stalled, *workers: str) -> Iterator[None]:
    """Workers whose processes are stopped inside the block."""
    pids = [stalled.worker(name).pid for name in workers]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def frozen(running: Mesh, name: str) -> Iterator[None]:
    """A service whose process is stopped inside the block."""
    running.processes[name].send_signal(signal.SIGSTOP)
    running.frozen.add(name)
    try:
        yield
    finally:
        running.frozen.discard(name)
        running.processes[name].send_signal(signal.SIGCONT)


@contextlib.contextmanager
def crashing(stalled: Stalled, kind: str) -> Iterator[None]:
    """All workers of a kind are killed as soon as they start, inside the block."""
    ended = threading.Event()

    def kill() -> None:
        while not ended.is_set():
            for worker in stalled.running.status(stalled.run).workers:
                if worker.kind == kind and worker.pid:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(worker.pid, signal.SIGKILL)
            time.sleep(0.1)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    try:
        yield
    finally:
        ended.set()
        killer.join(30)
