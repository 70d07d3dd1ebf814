"""A leader is suspended between a decision and its effect, its replica takes over and acts, and the
old leader continues: it changes no row, file, or artifact. Real processes on PostgreSQL, Consul,
NATS, and S3; services/buffer/fence_test.go and cmd/rolloutd/fence_test.go have every call."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from mesh import ENDED, ROOT, Mesh, until
from servers import Servers, postgres_binaries
from sim import Job, audited, finish, sim_mesh, stop, submit

from rollout.run.v1 import run_pb2

STEPS = 60
TRAINING = {
    "controller/trained": "learner-controller",  # CommitStep follows
    "controller/saved": "learner-controller",  # CreateSnapshot
    "controller/committed": "learner-controller",  # the next LeaseBatch, and RecordWeights
    "controller/delivered": "learner-controller",  # its own store
    "scheduler/advanced": "scheduler",  # work is published, then groups are excluded or issued again
    "buffer/leased": "buffer",  # its own store
}
"""Crash points that a training run reaches, with the service that is suspended there."""
REPUBLISHED = {"scheduler/advanced": ("/segments/", "/journal/", "rollout_buffer.ledger ", "rollout_buffer.segment ")}
"""What changes by design: work that is published twice is sampled twice, and the ledger drops and
counts the duplicates."""
DELETION = ("scheduler/deleting", "scheduler/deleted")
QUIET = 3
"""Seconds in which an old leader that continues would act."""

REPORTED = ("lease", "commit_mark", "event", "metric", "telemetry_report", "telemetry_chunk", "telemetry_source")
"""Tables of leases and of what services report, which a former leader may do."""


@pytest.fixture(scope="module")
def binary() -> Path:
    """`rolloutd` compiled with the crash points."""
    path = ROOT / "bin" / "crashpoint" / "rolloutd"
    command = ["go", "build", "-tags", "crashpoint", "-trimpath", "-o", f"{path.parent}/", "./rolloutd"]
    subprocess.run(command, cwd=ROOT / "cmd", check=True)
    return path


class Replicas:
    """Two replicas of each service with a leader, and the file that names the next point."""

    def __init__(self, folder: Path, binary: Path) -> None:
        self.order = folder / "order"
        self.servers = Servers(folder / "servers")
        self.running: Mesh = sim_mesh(folder / "mesh", "replicas", 0.05, ROLLOUT_CRASH_FILE=str(self.order))
        self.running.state.mkdir(parents=True)
        self.running.binary = binary
        self.running.config = folder / "rolloutd.toml"
        self.shared = folder / "shared"

    def start(self) -> None:
        self.servers.start()
        configured = self.servers.configuration(lambda name: self.servers.direct[name], self.shared)
        assert self.running.config is not None
        self.running.config.write_text(configured)
        self.running.start()

    def stop(self) -> None:
        for process in self.running.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
        stop(self.running)
        self.servers.stop()

    def ask(self, point: str) -> None:
        self.done().unlink(missing_ok=True)
        staging = self.order.with_name("staging")
        staging.write_text(f"stop {point}")
        staging.rename(self.order)

    def done(self) -> Path:
        return self.order.with_name("order.done")

    def suspended(self, service: str, point: str) -> str:
        """The process that has suspended itself."""
        until(self.done().exists, f"a leader at {point}", 120)
        names = (service, f"{service}-2")
        until(lambda: any(map(self.is_stopped, names)), f"{service} to be suspended", 10)
        name = next(filter(self.is_stopped, names))
        self.running.frozen.add(name)
        return name

    def is_stopped(self, name: str) -> bool:
        state = Path(f"/proc/{self.running.processes[name].pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        return state == "T"

    def resume(self, name: str) -> None:
        self.running.processes[name].send_signal(signal.SIGCONT)
        self.running.frozen.discard(name)

    def data(self) -> list[str]:
        """All rows, files of the run, and objects, in a form that can be compared."""
        port = self.servers.direct["postgres"]
        command = [str(postgres_binaries() / "pg_dump"), "-h", "127.0.0.1", "-p", str(port), "-U", "rollout"]
        command += ["--data-only", "--inserts", *(f"--exclude-table-data=*.{table}" for table in REPORTED), "postgres"]
        out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        return sorted(line for line in out.splitlines() if line.startswith("INSERT")) + sorted(self.files())

    def files(self) -> Iterator[str]:
        for folder in (self.shared, self.servers.folder / "s3"):
            for path in folder.rglob("*"):
                if path.is_file() and path.suffix != ".log" and ".vgwlocks" not in path.parts:
                    yield f"{path} {path.stat().st_size}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_leader_that_continues_late_changes_nothing(binary: Path, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", steps=STEPS, snapshot=2)
    replicas = Replicas(tmp_path, binary)
    running = replicas.running
    try:
        replicas.start()
        run = submit(running, running.plan(job.write()), job)
        running.until_step(run, 2)
        for point, service in TRAINING.items():
            replicas.ask(point)
            name = replicas.suspended(service, point)
            step = running.status(run).run.step
            running.until_step(run, step + 3)  # the successor acts
            pause(running, run)
            unchanged(replicas, name, point)
            running.scheduler.ResumeRun(run_pb2.ResumeRunRequest(run_id=run), wait_for_ready=True, timeout=60)
        finish(running, run)
        assert audited(running, run)["whole"]

        for point in DELETION:
            replicas.ask(point)
            doomed = run
            run = submit(running, running.plan(job.write()), job)
            running.until_step(run, 2)
            running.scheduler.CancelRun(run_pb2.CancelRunRequest(run_id=run))
            until(lambda run=run: running.status(run).run.state in ENDED, "the end of the run", 60)
            call = running.scheduler.DeleteRun.future(run_pb2.DeleteRunRequest(run_id=doomed), timeout=300)
            name = replicas.suspended("scheduler", point)
            until(lambda doomed=doomed: gone(running, doomed), "the successor to delete the run", 120)
            unchanged(replicas, name, point)
            call.cancel()
    finally:
        replicas.stop()


def pause(running: Mesh, run: str) -> None:
    running.scheduler.PauseRun(run_pb2.PauseRunRequest(run_id=run), wait_for_ready=True, timeout=60)
    until(lambda: running.status(run).run.state == run_pb2.RUN_STATE_PAUSED, "the run to be paused", 60)


def gone(running: Mesh, run: str) -> bool:
    try:
        running.status(run)
    except grpc.RpcError as error:
        return error.code() == grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]
    return False


def unchanged(replicas: Replicas, name: str, point: str) -> None:
    """Let the old leader continue, and compare everything before with everything after."""
    before = replicas.data()
    for _ in range(20):  # what the successor does last
        time.sleep(QUIET)
        last, before = before, replicas.data()
        if last == before:
            break
    else:
        raise AssertionError(f"{point}: the data changes while nothing runs")
    replicas.resume(name)
    time.sleep(QUIET)
    after = replicas.data()
    changed = [each for each in sorted(set(after) ^ set(before)) if not any(map(each.__contains__, REPUBLISHED.get(point, ())))]
    assert not changed, f"{point}: {changed[:20]}"
