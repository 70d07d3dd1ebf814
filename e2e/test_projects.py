"""Two projects on one control plane: nothing of one is visible with a key of the other."""

from __future__ import annotations

import importlib
import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from mesh import ROOT, Mesh, until
from sim import Job, sim_mesh, stop
from test_snapshots import rollout

from rollout.run.v1 import run_pb2
from rollout.storage.v1 import storage_pb2, storage_pb2_grpc

SERVICES = ("buffer", "gateway", "key", "learner", "plan", "run", "serving", "snapshot", "storage")
NAMES = ("run_id", "session_id", "snapshot_id", "serving_id", "model", "from_snapshot")
"""The fields of requests that name something of a run."""
CREATES = {"CreateRun", "CreatePlan", "ServeModel", "CreateSnapshot"}
"""Calls whose other fields would have to be valid. CreateRun with a snapshot is tested below."""
READS = {
    *("GetRun", "WatchRun", "ListSteps", "ListGroups", "GetProgress", "WatchProgress", "ListSnapshots", "GetSnapshot"),
    *("ListEvents", "QueryMetrics", "GetMissing", "GetSession", "ListWaits"),
}
"""Calls that succeed with a key of the project, so that the names above reach what exists."""


def key_of(state: Path, name: str, project: str) -> str:
    """A new API key that permits everything in a project."""
    create = [ROOT / "bin" / "rollout", "keys", "create", name, "--scope", "admin", "--project", project, "--state-dir", state]
    return subprocess.run(create, check=True, capture_output=True, text=True).stdout.strip()


def methods() -> Iterator[MethodDescriptor]:
    """Every call that a key may make and that names something of a run."""
    for name in SERVICES:
        module = importlib.import_module(f"rollout.{name}.v1.{name}_pb2")
        for service in module.DESCRIPTOR.services_by_name.values():
            if not service.name.endswith("WorkerService"):
                yield from (method for method in service.methods if named(method.input_type) and method.name not in CREATES)


def named(descriptor: Descriptor, depth: int = 2) -> list[list[str]]:
    """The paths of the fields that name something of a run, in a message and the messages in it."""
    found: list[list[str]] = []
    for field in descriptor.fields:
        if field.type == FieldDescriptor.TYPE_STRING and field.name in NAMES and not field.is_repeated:
            found.append([field.name])
        elif depth and field.message_type and not field.is_repeated and field.message_type.full_name.startswith("rollout."):
            found += [[field.name, *path] for path in named(field.message_type, depth - 1)]
    return found


def request(method: MethodDescriptor, ids: dict[str, str]) -> Message:
    """A request in which each field of NAMES has the id of its kind."""
    made = message_factory.GetMessageClass(method.input_type)()
    for path in named(method.input_type):
        inner: Any = made
        for part in path[:-1]:
            inner = getattr(inner, part)
        setattr(inner, path[-1], ids[path[-1]])
    if method.name == "GetMissing":
        made.groups.add()  # type: ignore[attr-defined]
    if method.name == "MaterializeSnapshot":
        made.directory = "/proc/nowhere"  # type: ignore[attr-defined]
    return made


def answer(channel: grpc.Channel, key: str, method: MethodDescriptor, ids: dict[str, str]) -> tuple[str, str, str]:
    """What a call returns: code, text of the error, and text of the first response."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    read, sent = message_factory.GetMessageClass(method.output_type).FromString, request(method, ids)
    options: dict[str, Any] = {"timeout": 5, "metadata": [("authorization", f"Bearer {key}")]}
    try:
        if method.client_streaming:
            put = channel.stream_unary(path, response_deserializer=read)
            return "OK", "", str(put(iter([sent.SerializeToString()]), **options))
        if method.server_streaming:
            stream = channel.unary_stream(path, response_deserializer=read)(sent.SerializeToString(), **options)
            first = str(next(stream, ""))
            stream.cancel()
            return "OK", "", first
        return "OK", "", str(channel.unary_unary(path, response_deserializer=read)(sent.SerializeToString(), **options))
    except grpc.RpcError as error:
        return error.code().name, f"{error.details()} {details(error)}", ""


def details(error: Any) -> list[str]:
    """The reason and the metadata of an error."""
    texts: list[str] = []
    for detail in status_pb2.Status.FromString(dict(error.trailing_metadata()).get("grpc-status-details-bin", b"")).details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            texts += [info.reason, *sorted(f"{name}={value}" for name, value in info.metadata.items())]
    return texts


def http(running: Mesh, key: str, path: str, body: dict[str, Any] | None = None, **headers: str) -> tuple[int, str]:
    """Status and text of a request to the OpenAI-compatible endpoint."""
    data = json.dumps(body).encode() if body else None
    asked = urllib.request.Request(f"{running.daemon()['gateway']}{path}", data)
    for name, value in {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **headers}.items():
        asked.add_header(name, value)
    try:
        with urllib.request.urlopen(asked, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_nothing_of_another_project_is_visible(tmp_path: Path) -> None:
    state = tmp_path / "state"
    job = Job(tmp_path / "job", steps=100_000, mode="async", staleness=2, snapshot=50)
    running = sim_mesh(state, seconds=0.05).start()
    try:
        created = run_pb2.CreateRunRequest(lock=running.plan(job.write()), base_dir=str(job.folder), project="math")
        run = running.scheduler.CreateRun(created).run.run_id
        until(lambda: running.status(run).run.step >= 2, "two steps", 60)
        snapshot = rollout(state, "snapshot", "create", run, "--kind", "train_state")["snapshots"][0]["snapshot_id"]
        ada, eve = key_of(state, "ada", "math"), key_of(state, "eve", "code")
        session = "session-of-math"
        body = {"model": "sim", "prompt": "row 1:", "max_tokens": 4}
        status, text = http(running, ada, "/v1/completions", body, **{"x-rollout-session": session})
        assert status == 200, text
        theirs = {"run_id": run, "session_id": session, "snapshot_id": snapshot, "from_snapshot": snapshot}
        theirs |= {"serving_id": "serve-1", "model": "sim"}
        absent = {name: value[:-4] + "0000" if name != "model" else "none" for name, value in theirs.items()}
        channel = grpc.insecure_channel(str(running.daemon()["grpc"]))
        secrets = (run, snapshot, session)
        checked: set[str] = set()
        hints: list[str] = []
        for method in methods():
            checked.add(method.name)
            code, error, response = answer(channel, eve, method, theirs)
            unknown = answer(channel, eve, method, absent)
            for name, value in theirs.items():  # an error may repeat what the caller named
                error = error.replace(value, absent[name])
            if (code, error) != unknown[:2]:
                hints.append(f"{method.full_name}: {code} {error}; about what does not exist: {unknown}")
            if code == "OK" and any(secret in response for secret in secrets):
                hints.append(f"{method.full_name}: {response}")
            if method.name in READS:
                own = answer(channel, ada, method, theirs)
                if own[0] != "OK" or code != "NOT_FOUND":
                    hints.append(f"{method.full_name}: {code}; with a key of the project {own[:2]}")
        assert not hints, "\n".join(hints)
        assert checked >= READS, READS - checked

        events = storage_pb2_grpc.EventServiceStub(channel)
        metadata = (("authorization", f"Bearer {eve}"),)
        assert not any(e.run_id for e in events.ListEvents(storage_pb2.ListEventsRequest(), metadata=metadata).events)
        try:
            for response in events.TailEvents(storage_pb2.TailEventsRequest(), metadata=metadata, timeout=3):
                assert not any(e.run_id for e in response.events)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED

        assert "sim" in http(running, ada, "/v1/models")[1]
        assert "sim" not in http(running, eve, "/v1/models")[1]
        for model in ("sim", run):
            of_math, of_none = (http(running, eve, "/v1/completions", {**body, "model": name}) for name in (model, "none"))
            assert of_math[0] == of_none[0] >= 400, (of_math, of_none)
            assert of_math[1].replace(model, "none") == of_none[1]

        def cli(key: str, *arguments: str) -> subprocess.CompletedProcess[str]:
            command = [str(ROOT / "bin" / "rollout"), *arguments, "--server", str(running.daemon()["grpc"])]
            local = {"ROLLOUT_API_KEY": key, "HOME": str(tmp_path)}
            return subprocess.run(command, capture_output=True, text=True, env=local, timeout=60)

        runs = ("runs", "list"), ("runs", "show", run), ("runs", "show", "sim")
        for arguments in (*runs, ("snapshot", "list", run), ("snapshot", "show", snapshot)):
            found, hidden = cli(ada, *arguments), cli(eve, *arguments)
            assert found.returncode == 0 and (run in found.stdout or snapshot in found.stdout), (arguments, found)
            assert run not in hidden.stdout and snapshot not in hidden.stdout, (arguments, hidden)
            assert hidden.returncode != 0 or "list" in arguments, (arguments, hidden)
    finally:
        stop(running)
