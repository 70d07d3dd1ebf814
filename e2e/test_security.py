"""Mutual TLS between seven processes and their workers, and the places where secrets may be."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from mesh import ROOT, Mesh
from sim import Job, audited, journals_agree, sim_mesh, stop, submit

from rollout.client import connect
from rollout.run.v1 import run_pb2, run_pb2_grpc

ROLLOUT = str(ROOT / "bin" / "rollout")


def certs(folder: Path, *arguments: str) -> None:
    subprocess.run([ROLLOUT, "certs", *arguments, "--dir", str(folder)], check=True, capture_output=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An authority, and certificates of a service, a worker, and a person."""
    made = tmp_path / "certs"
    certs(made, "init")
    for kind, name in (("service", "mesh"), ("worker", "sim"), ("person", "ada")):
        certs(made, "issue", kind, name)
    return made


@pytest.fixture
def running(tmp_path: Path, folder: Path) -> Iterator[Mesh]:
    files = {"ca-file": "ca.pem", "cert-file": "service-mesh.pem", "key-file": "service-mesh-key.pem"}
    files |= {"worker-cert-file": "worker-sim.pem", "worker-key-file": "worker-sim-key.pem"}
    arguments = [text for flag, file in files.items() for text in (f"--tls-{flag}", str(folder / file))]
    made = sim_mesh(tmp_path / "state", "seven", seconds=0.05, arguments=tuple(arguments))
    try:
        yield made.start()
    finally:
        stop(made)


def test_a_run_over_mutual_tls(running: Mesh, folder: Path, tmp_path: Path) -> None:
    job = Job(tmp_path / "job")
    run = submit(running, running.plan(job.write()), job)
    running.until_step(run, 3)
    for name in ("nats", "consul"):
        assert str(running.daemon()[name]).startswith(("tls://", "https://")), name
    certs(folder, "renew", "--all")  # while processes use the old files
    learner = next(worker for worker in running.status(run).workers if worker.kind == "learner")
    running.processes["planner"].kill()  # comes back with the renewed certificate
    running.start_service("planner")
    with connect(state=running.folder("scheduler")) as connection:  # with the files that rolloutd.json names
        assert next(iter(connection.follow(run))).run.run_id == run
    digest = running.finish(run).weights_digest
    report = audited(running, run)
    assert (report["steps"], report["weights_digest"]) == (job.steps, digest)
    assert journals_agree(running, run, job)["excluded"] == 3
    assert learner.address, learner
    assert "certificates were renewed" in running.log("planner") + running.log("scheduler") + running.log("buffer")


def test_plain_text_is_refused(running: Mesh) -> None:
    for service in ("scheduler", "storage"):
        with grpc.insecure_channel(str(running.daemon(service)["grpc"])) as channel, pytest.raises(grpc.RpcError) as refused:
            run_pb2_grpc.SchedulerServiceStub(channel).ListRuns(run_pb2.ListRunsRequest(), timeout=10)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]


class Collector(grpc.GenericRpcHandler):
    """Stores the requests of OTLP exporters unchanged."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        self._server.add_generic_rpc_handlers((self,))
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(self._take)

    def _take(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self.got.append(request)
        return b""

    def stop(self) -> None:
        self._server.stop(None).wait()


def told_by_processes(running: Mesh, run: str) -> dict[str, bytes]:
    """What every user of the host can see of the processes, and what code in the workers can see of
    their environment."""
    daemon = running.processes["all"].pid
    workers = [worker.pid for worker in running.status(run).workers]
    outcome = {f"/proc/{pid}/cmdline": b"" for pid in (daemon, *workers)} | {f"/proc/{pid}/environ": b"" for pid in workers}
    for path in outcome:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has exited
            outcome[path] = Path(path).read_bytes()
    return outcome


def test_secrets_are_only_in_their_files(tmp_path: Path) -> None:
    """After a run, search all files, processes, and spans for secrets. They may only be in the
    files for secrets."""
    holder = tmp_path / "nats-token"
    holder.write_text("planted-nats-token-0123456789")
    holder.chmod(0o600)
    state = tmp_path / "state"
    arguments = ("--nats-token", f"file:{holder}", "--blob-access-key", "id", "--blob-secret-key", "env:PLANTED_S3")
    collector = Collector()
    environment = {"PLANTED_S3": "planted-s3-secret-0123456789", "ROLLOUT_API_KEY": "planted-api-key-0123456789"}
    tracing = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_EXPORTER_OTLP_HEADERS": "x-token=planted-otlp-0123456789"}
    running = sim_mesh(state, "all", 0.2, arguments, **environment, **tracing)
    job = Job(tmp_path / "job", steps=6)
    try:
        running.start()
        create = [ROLLOUT, "keys", "create", "ada", "--scope", "read", "--state-dir", str(state)]
        local = {"HOME": str(tmp_path)}
        key = subprocess.run(create, check=True, capture_output=True, text=True, env=local).stdout.strip()
        run = submit(running, running.plan(job.write()), job)
        running.until_step(run, 2)
        seen = told_by_processes(running, run)
        running.finish(run)
        report = [ROLLOUT, "runs", "list", "--state-dir", str(state)]
        assert subprocess.run(report, check=True, capture_output=True, env={"ROLLOUT_API_KEY": key, "HOME": str(tmp_path)}).stdout
        denied = [ROLLOUT, "runs", "cancel", run, "--state-dir", str(state)]
        outcome = subprocess.run(denied, capture_output=True, text=True, env={"ROLLOUT_API_KEY": key, "HOME": str(tmp_path)})
        assert "SCOPE_INSUFFICIENT" in outcome.stderr and "--scope submit" in outcome.stderr, outcome.stderr
        secrets = [holder.read_bytes(), b"planted-s3-secret-0123456789", key.encode(), running.token().encode()]
        files = [path for path in tmp_path.rglob("*") if path.is_file() and path not in (holder, state / "token")]
        assert len(files) > 20
        secrets += [text.encode() for text in environment.values()]
        hits = [str(path) for path in files if any(secret in path.read_bytes() for secret in secrets)]
        hits += [path for path, text in seen.items() if any(secret in text for secret in secrets)]
        assert not hits
        assert sum(1 for path, text in seen.items() if path.endswith("environ") and text) >= 2  # of workers
        running.stop()  # which exports the remaining spans
    finally:
        stop(running)
        collector.stop()
    spans = b"".join(collector.got)
    assert b"rolloutd" in spans and b"CreateRun" in spans
    assert not [secret for secret in secrets if secret in spans]


_NOSY = """

import sys

_CALLER = pathlib.Path(sys.argv[0])  # what the process that calls the reward runs: a file, or a package
_CALLER = _CALLER.parent.name if _CALLER.stem == "__main__" else _CALLER.stem
pathlib.Path(__file__).with_name(f"environ-{_CALLER}").write_bytes(pathlib.Path("/proc/self/environ").read_bytes())
"""
_PUBLIC = {"probe", "child", "learner", "inference"}
_WORKERS = {"learner", "inference"}
_REACHES = {
    "PLANTED_HARMLESS": _PUBLIC,
    "AWS_PROFILE": _PUBLIC,  # set in `worker.env`
    "PLANTED_NATS": _WORKERS,
    "PLANTED_CONSUL": _WORKERS,
    "OTEL_EXPORTER_OTLP_HEADERS": _WORKERS,
    "PLANTED_S3": set[str](),
    "AWS_SECRET_ACCESS_KEY": set[str](),
    "GOOGLE_APPLICATION_CREDENTIALS": set[str](),
    "PGPASSWORD": set[str](),
    "ROLLOUT_API_KEY": set[str](),
}


def test_processes_only_get_the_secrets_that_they_need(tmp_path: Path) -> None:
    """The environments of a run's processes according to the kernel. Each secret is only where it
    is needed, and no secret is where rewards run."""
    planted = {name: f"planted-{name}-0123456789" for name in _REACHES}
    secrets = ("--nats-token", "env:PLANTED_NATS", "--consul-token", "env:PLANTED_CONSUL", "--blob-secret-key", "env:PLANTED_S3")
    running = sim_mesh(
        tmp_path / "state", "all", 0.05, (*secrets, "--blob-access-key", "id", "--worker-env", "AWS_PROFILE"), **planted
    )
    job = Job(tmp_path / "job", steps=30)
    config = job.write()
    with (job.folder / "reward.py").open("a") as reward:
        reward.write(_NOSY)
    try:
        running.start()
        run = submit(running, running.plan(config), job)
        running.until_step(run, 1)
        seen = {worker.kind: Path(f"/proc/{worker.pid}/environ").read_bytes() for worker in running.status(run).workers}
        seen |= {path.name.removeprefix("environ-"): path.read_bytes() for path in job.folder.glob("environ-*")}
    finally:
        stop(running)
    assert seen.keys() == _PUBLIC
    reached = {name: {who for who, text in seen.items() if text_of.encode() in text} for name, text_of in planted.items()}
    assert reached == _REACHES
