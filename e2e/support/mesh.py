"""All services for a test: `rolloutd` processes with a new state folder, and stubs for calls."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from become import become

from rollout.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from rollout.inference.v1 import inference_pb2_grpc
from rollout.learner.v1 import learner_pb2_grpc
from rollout.plan.v1 import plan_pb2, plan_pb2_grpc
from rollout.run.v1 import run_pb2, run_pb2_grpc
from rollout.snapshot.v1 import snapshot_pb2_grpc
from rollout.storage.v1 import storage_pb2_grpc
from rollout_testing.credential import peer_token

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("planner", "scheduler", "rollout-gateway", "learner-controller", "buffer", "snapshot", "storage")
REPLICATED = ("scheduler", "buffer", "learner-controller")
ENDED = {run_pb2.RUN_STATE_SUCCEEDED, run_pb2.RUN_STATE_FAILED, run_pb2.RUN_STATE_CANCELLED, run_pb2.RUN_STATE_INTERRUPTED}


@dataclass
class Mesh:
    """`shape` is `all` (one process hosts every target), `seven` (one process per service, and one
    for NATS and the registry), or `replicas` (one process per service on running servers, and
    `scheduler-2`, `buffer-2`, `learner-controller-2`)."""

    state: Path
    shape: str = "all"
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    """Additional arguments of each `rolloutd`."""
    environment: dict[str, str] = field(default_factory=dict)
    """Additional environment variables of each `rolloutd`, which the workers inherit."""
    binary: Path = ROOT / "bin" / "rolloutd"
    own_arguments: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Additional arguments of single processes."""
    config: Path | None = None
    """The rolloutd.toml of all processes; required for the shape `replicas`."""
    namespace: str | None = None
    """The network namespace of all processes."""
    frozen: set[str] = field(default_factory=set)
    """Processes that do not answer and are not called."""
    _channels: dict[str, grpc.Channel] = field(default_factory=dict)

    def start(self) -> Mesh:
        for name in self.members():
            self.launch(name)
            if name == "servers":
                self.wait(name)
        for name in self.members():
            self.wait(name)
        return self

    def members(self) -> tuple[str, ...]:
        """The names of all processes."""
        if self.shape == "all":
            return ("all",)
        if self.shape == "seven":
            return ("servers", *SERVICES)
        return (*SERVICES, *(f"{name}-2" for name in REPLICATED))

    def start_service(self, name: str) -> None:
        """Start the `rolloutd` with this name, and wait until it serves."""
        self.launch(name)
        self.wait(name)

    def launch(self, name: str) -> None:
        """Start the `rolloutd` with this name, without waiting."""
        state = self.folder(name)
        state.mkdir(parents=True, exist_ok=True)
        (state / "rolloutd.json").unlink(missing_ok=True)
        target = {"all": "all", "servers": "nats,registry"}.get(name, name.removesuffix("-2"))
        command = [str(self.binary), "--state-dir", str(state), "--target", target]
        command += ["--config", str(self.config)] if self.config else []
        command += [*self.arguments, *self.own_arguments.get(name, ())]
        if self.shape == "seven" and name != "servers":
            command += ["--join", str(self.state)]
        with (self.state / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                become(command, namespace=self.namespace),
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **self.environment},
            )

    def wait(self, name: str, seconds: float = 120) -> None:
        """Wait until a process serves."""
        process = self.processes[name]
        until(lambda: self.serves(name) or process.poll() is not None, f"{name} to serve", seconds)
        if process.poll() is not None:
            raise AssertionError(f"rolloutd {name} exited with code {process.returncode}:\n{self.log(name)}")

    def serves(self, name: str) -> bool:
        return (self.folder(name) / "rolloutd.json").exists()

    def log(self, name: str) -> str:
        return (self.state / f"{name}.log").read_text(errors="replace")[-4000:]

    def folder(self, name: str) -> Path:
        """The state folder of a process."""
        return self.state if name in ("all", "servers") else self.state / name

    def daemon(self, service: str = "scheduler") -> dict[str, object]:
        """The address and token of a process that hosts the service. Of replicas any that serves is
        returned, because each forwards calls."""
        names = ("all",) if self.shape == "all" else (service, f"{service}-2")
        serving = (name for name in names if self.alive(name) and name not in self.frozen and self.serves(name))
        return json.loads((self.folder(next(serving, names[0])) / "rolloutd.json").read_text())

    def alive(self, name: str) -> bool:
        return name in self.processes and self.processes[name].poll() is None

    def leader(self, service: str) -> tuple[int, str]:
        """Epoch and process of the newest registered leader of a replicated service."""
        url = f"http://{self.daemon('planner')['consul']}/v1/health/service/{service}"
        with urllib.request.urlopen(url, timeout=5) as response:
            found = [(int(e["Service"]["Meta"]["epoch"]), e["Service"]["Port"]) for e in json.load(response)]
        epoch, port = max(found)
        return epoch, next(name for name in self.members() if self.port(name) == port)

    def port(self, name: str) -> int:
        """The gRPC port of a process."""
        return int(json.loads((self.folder(name) / "ports.json").read_text())["grpc"])

    def kill(self, name: str) -> None:
        """Kill a `rolloutd` with SIGKILL, and wait until it has exited."""
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait(60)

    def stop(self) -> None:
        for process in reversed(self.processes.values()):
            process.terminate()
        for name, process in self.processes.items():
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                raise AssertionError(f"rolloutd {name} did not drain:\n{self.log(name)}") from None

    def token(self) -> str:
        return Path(str(self.daemon()["token_file"])).read_text().strip()

    def channel(self, address: str, token: str = "") -> grpc.Channel:
        if address not in self._channels:
            channel = grpc.insecure_channel(address, _RECONNECT)
            if files := self.certificates():
                ca, cert, key = (Path(file).read_bytes() for file in files)
                channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), _RECONNECT)
            self._channels[address] = grpc.intercept_channel(channel, _Bearer(token or self.token()))
        return self._channels[address]

    def certificates(self) -> list[str]:
        """The files of authority, certificate, and key, if the services use TLS."""
        outcome = self.daemon()
        return [str(outcome[name]) for name in ("ca_file", "cert_file", "key_file") if name in outcome]

    def _service(self, name: str) -> grpc.Channel:
        return self.channel(str(self.daemon(name)["grpc"]))

    @property
    def planner(self) -> plan_pb2_grpc.PlannerServiceStub:
        return plan_pb2_grpc.PlannerServiceStub(self._service("planner"))

    @property
    def scheduler(self) -> run_pb2_grpc.SchedulerServiceStub:
        return run_pb2_grpc.SchedulerServiceStub(self._service("scheduler"))

    @property
    def buffer(self) -> buffer_pb2_grpc.BufferServiceStub:
        return buffer_pb2_grpc.BufferServiceStub(self._service("buffer"))

    @property
    def events(self) -> storage_pb2_grpc.EventServiceStub:
        return storage_pb2_grpc.EventServiceStub(self._service("storage"))

    @property
    def snapshots(self) -> snapshot_pb2_grpc.SnapshotServiceStub:
        return snapshot_pb2_grpc.SnapshotServiceStub(self._service("snapshot"))

    def inference(self, run: str, address: str) -> inference_pb2_grpc.InferenceWorkerServiceStub:
        return inference_pb2_grpc.InferenceWorkerServiceStub(self.channel(address, peer_token(self.token(), run)))

    def learner(self, run: str, address: str) -> learner_pb2_grpc.LearnerWorkerServiceStub:
        return learner_pb2_grpc.LearnerWorkerServiceStub(self.channel(address, peer_token(self.token(), run)))

    def plan(self, config: Path, *overrides: str) -> bytes:
        source = plan_pb2.ConfigSource(toml=config.read_bytes(), file=config.name, base_dir=str(config.parent), set=overrides)
        planned = self.planner.CreatePlan(plan_pb2.CreatePlanRequest(source=source))
        assert not planned.problems, planned.problems
        return planned.lock

    def submit(self, config: Path, *overrides: str) -> str:
        lock = self.plan(config, *overrides)
        return self.scheduler.CreateRun(run_pb2.CreateRunRequest(lock=lock, base_dir=str(config.parent))).run.run_id

    def watch(self, run: str) -> Iterator[run_pb2.RunStatus]:
        """Yield each status until the end, even if another replica becomes the leader."""
        while True:
            try:
                for update in self.scheduler.WatchRun(run_pb2.WatchRunRequest(run_id=run), timeout=900):
                    yield update.status
                return
            except grpc.RpcError as error:
                if self.shape != "replicas" or error.code() != grpc.StatusCode.UNAVAILABLE:  # type: ignore[attr-defined]
                    raise
                time.sleep(0.1)

    def status(self, run: str) -> run_pb2.RunStatus:
        """The status of a run, if need be from the replica that becomes the leader within 10
        seconds."""
        deadline = time.monotonic() + 10
        while True:
            try:
                return self.scheduler.GetRun(run_pb2.GetRunRequest(run_id=run)).status
            except grpc.RpcError as error:
                away = error.code() == grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
                if self.shape != "replicas" or not away or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def until_step(self, run: str, step: int) -> run_pb2.RunStatus:
        """The first status in which the run has committed `step`."""
        for status in self.watch(run):
            if status.run.step >= step or status.run.state in ENDED:
                assert status.run.step >= step, describe(status)
                return status
        raise AssertionError(f"{run} ended before step {step}")

    def finish(self, run: str) -> run_pb2.Run:
        """Wait for the end of a run, which must succeed."""
        last = None
        for status in self.watch(run):
            last = status
        assert last is not None
        assert last.run.state == run_pb2.RUN_STATE_SUCCEEDED, describe(last) + self._worker_logs(last.run)
        return last.run

    def _worker_logs(self, run: run_pb2.Run) -> str:
        logs = sorted(Path(run.directory, "workers").glob("*.log"))
        return "".join(f"\n--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)

    def ledger(self, run: str) -> tuple[list[buffer_pb2.GroupRecord], list[buffer_pb2.StepRecord], buffer_pb2.LedgerState]:
        groups = [g for page in pages(self.buffer.ListGroups, buffer_pb2.ListGroupsRequest(run_id=run)) for g in page.groups]
        steps = [s for page in pages(self.buffer.ListSteps, buffer_pb2.ListStepsRequest(run_id=run)) for s in page.steps]
        state = next(iter(self.buffer.WatchLedger(buffer_pb2.WatchLedgerRequest(run_id=run)))).state
        return groups, steps, state


def pages(call: Callable[[Any], Any], request: Any) -> Iterator[Any]:
    """All pages of a list."""
    while True:
        page = call(request)
        yield page
        request.page_token = page.next_page_token
        if not page.next_page_token:
            return


_RECONNECT = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500))


class _Bearer(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor, grpc.StreamUnaryClientInterceptor):
    def __init__(self, token: str) -> None:
        self._metadata = ("authorization", f"Bearer {token}")

    def _with(self, details: grpc.ClientCallDetails) -> grpc.ClientCallDetails:
        return details._replace(metadata=[*(details.metadata or ()), self._metadata])  # type: ignore[attr-defined]

    def intercept_unary_unary(self, continuation, client_call_details, request):
        return continuation(self._with(client_call_details), request)

    def intercept_unary_stream(self, continuation, client_call_details, request):
        return continuation(self._with(client_call_details), request)

    def intercept_stream_unary(self, continuation, client_call_details, request_iterator):
        return continuation(self._with(client_call_details), request_iterator)


def describe(status: run_pb2.RunStatus) -> str:
    run = status.run
    return (
        f"{run.run_id} is {run_pb2.RunState.Name(run.state)} at step {run.step}/{run.total_steps}, phase {status.phase}, "
        f"waits for {status.waiting_for!r}: {run.reason} {run.message}"
    )


def assert_consumed_once(mesh: Mesh, run: str, *, steps: int, groups_per_step: int, group_size: int, forks: bool = False) -> str:
    """Check that each position is consumed by the step of its window, once. forks: samples may have
    several parts. Returns the last weights digest."""
    groups, records, state = mesh.ledger(run)
    assert [record.step for record in records] == list(range(1, steps + 1))
    assert [group.position for group in groups] == list(range(steps * groups_per_step))
    for group in groups:
        assert group.state == buffer_pb2.GROUP_STATE_CONSUMED, group
        assert group.step == group.position // groups_per_step + 1, group
        assert group.samples == group_size, group
    trained, expected = sum(record.samples for record in records), steps * groups_per_step * group_size
    assert trained == expected or (forks and trained > expected), trained
    assert state.excluded == 0 and state.refused == 0, state
    return records[-1].weights_digest


def until(condition: Callable[[], bool], what: str, seconds: float) -> None:
    """Wait for a condition outside of this process, such as a file or the end of a process."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds} s for {what}")
        time.sleep(0.02)


@contextlib.contextmanager
def mesh(state: Path, shape: str = "all", config: Path | None = None) -> Iterator[Mesh]:
    running = Mesh(state, shape, config=config)
    try:
        yield running.start()
        running.stop()
    finally:
        for process in running.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        sys.stdout.flush()
