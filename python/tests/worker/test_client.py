"""The client of the control plane, with fakes of planner, scheduler, and storage."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from rollout.client import AsyncClient, NoDaemon, PlanRefused, RemoteError, connect, connect_async, local_server
from rollout.event.v1.event_pb2 import Event
from rollout.plan.v1 import plan_pb2
from rollout.plan.v1.plan_pb2_grpc import PlannerServiceServicer, add_PlannerServiceServicer_to_server
from rollout.run.v1 import run_pb2
from rollout.run.v1.run_pb2_grpc import SchedulerServiceServicer, add_SchedulerServiceServicer_to_server
from rollout.storage.v1 import storage_pb2
from rollout.storage.v1.storage_pb2_grpc import EventServiceServicer, add_EventServiceServicer_to_server
from rollout_workers.worker.status import EdgeError, abort


class RunNotFound(EdgeError):
    reason = "RUN_NOT_FOUND"


class Planner(PlannerServiceServicer):
    async def CreatePlan(self, request: plan_pb2.CreatePlanRequest, context: Any) -> plan_pb2.CreatePlanResponse:
        assert dict(context.invocation_metadata())["authorization"] == "Bearer secret"
        if b"bad" in request.source.toml:
            problem = plan_pb2.Problem(file="run.toml", line=3, column=1, message="unknown key", fix="remove it")
            return plan_pb2.CreatePlanResponse(problems=[problem, problem])
        lock = json.dumps([request.source.base_dir, list(request.source.set)]).encode()
        return plan_pb2.CreatePlanResponse(plan=plan_pb2.Plan(format=2), lock=lock)


class Scheduler(SchedulerServiceServicer):
    async def CreateRun(self, request: run_pb2.CreateRunRequest, context: Any) -> run_pb2.CreateRunResponse:
        return run_pb2.CreateRunResponse(run=run_pb2.Run(run_id="run-1", name=request.lock.decode()))

    async def GetRun(self, request: run_pb2.GetRunRequest, context: Any) -> run_pb2.GetRunResponse | None:
        if request.run_id in ("run-1", "sums"):
            return run_pb2.GetRunResponse(status=run_pb2.RunStatus(run=run_pb2.Run(run_id="run-1", name="sums")))
        await abort(context, RunNotFound("no such run", metadata={"run": request.run_id}, retry_seconds=0.5))

    async def WatchRun(self, request: run_pb2.WatchRunRequest, context: Any) -> AsyncIterator[run_pb2.WatchRunResponse]:
        for step, state in ((1, run_pb2.RUN_STATE_RUNNING), (2, run_pb2.RUN_STATE_SUCCEEDED)):
            yield run_pb2.WatchRunResponse(status=run_pb2.RunStatus(run=run_pb2.Run(step=step, state=state)))
        await asyncio.Event().wait()  # the end of the stream is the end of the run


class Storage(EventServiceServicer):
    async def TailEvents(
        self, request: storage_pb2.TailEventsRequest, context: Any
    ) -> AsyncIterator[storage_pb2.TailEventsResponse]:
        assert request.filter.run_id in ("", "run-1")  # for the scheduler, which owns the names of runs
        kinds = request.filter.kinds
        yield storage_pb2.TailEventsResponse(events=[Event(sequence=1, kind=kinds[0]), Event(sequence=2, kind=kinds[0])])
        await asyncio.Event().wait()

    async def QueryMetrics(self, request: storage_pb2.QueryMetricsRequest, context: Any) -> storage_pb2.QueryMetricsResponse:
        assert request.run_id == "run-1"
        points = [storage_pb2.Point(step=step, value=step / 2) for step in (1, 2)]
        return storage_pb2.QueryMetricsResponse(series=[storage_pb2.Series(name=request.names[0], points=points)])


@pytest.fixture
async def state(tmp_path: Path) -> AsyncIterator[Path]:
    """The state folder of a daemon that serves the fakes."""
    server = grpc.aio.server()
    add_PlannerServiceServicer_to_server(cast(Any, Planner)(), server)
    add_SchedulerServiceServicer_to_server(cast(Any, Scheduler)(), server)
    add_EventServiceServicer_to_server(cast(Any, Storage)(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    (tmp_path / "token").write_text("secret\n")
    written = {"grpc": f"127.0.0.1:{port}", "token_file": str(tmp_path / "token")}
    (tmp_path / "rolloutd.json").write_text(json.dumps(written))
    (tmp_path / "run.toml").write_text('name = "good"')
    (tmp_path / "bad.toml").write_text("bad = 1")
    yield tmp_path
    await server.stop(None)


async def test_plan_submit_follow_tail(state: Path) -> None:
    async with connect_async(state=state) as client:
        assert isinstance(client, AsyncClient)
        plan = await client.plan(state / "run.toml", set=["train.steps=2"])
        run = await client.submit(plan)
        assert json.loads(run.name) == [str(state), ["train.steps=2"]]
        assert [status.run.step async for status in client.follow(run.run_id)] == [1, 2]
        events = client.tail(run.run_id, kinds=["step.committed"])
        assert [(await anext(events)).sequence, (await anext(events)).sequence] == [1, 2]
        await events.aclose()
        assert await client.metrics(run.run_id, ["loss"]) == {"loss": [(1, 0.5), (2, 1.0)]}


async def test_the_blocking_client_returns_the_same(state: Path) -> None:
    def script() -> tuple[str, list[int], int, dict[str, Any]]:
        with connect(state=state) as client:
            run = client.submit(client.plan(state / "run.toml"))
            steps = [status.run.step for status in client.follow(run.run_id)]
            first = next(client.tail(run.run_id, kinds=["log"]))
            return run.run_id, steps, first.sequence, client.metrics(run.run_id, ["loss"])

    assert await asyncio.to_thread(script) == ("run-1", [1, 2], 1, {"loss": [(1, 0.5), (2, 1.0)]})


async def test_reads_metrics_and_events_of_a_run_by_name(state: Path) -> None:
    async with connect_async(state=state) as client:
        assert await client.metrics("sums", ["loss"]) == {"loss": [(1, 0.5), (2, 1.0)]}
        for run in ("sums", ""):
            events = client.tail(run, kinds=["log"])
            assert (await anext(events)).sequence == 1
            await events.aclose()
        with pytest.raises(RemoteError, match="no such run"):
            await client.metrics("nothing")
        with pytest.raises(RemoteError, match="no such run"):
            await anext(client.tail("nothing"))

    def script() -> None:
        with connect(state=state) as client:
            assert client.metrics("sums", ["loss"]) == {"loss": [(1, 0.5), (2, 1.0)]}
            assert next(client.tail("sums", kinds=["log"])).sequence == 1
            with pytest.raises(RemoteError, match="no such run"):
                client.metrics("nothing")
            with pytest.raises(RemoteError, match="no such run"):
                next(client.tail("nothing"))

    await asyncio.to_thread(script)


async def test_an_invalid_configuration_raises_every_problem(state: Path) -> None:
    async with connect_async(state=state) as client:
        with pytest.raises(PlanRefused, match=r"run\.toml:3:1: unknown key; remove it") as caught:
            await client.plan(state / "bad.toml")
    assert len(caught.value.problems) == 2


async def test_a_remote_error_has_its_reason(state: Path) -> None:
    async with connect_async(state=state) as client:
        with pytest.raises(RemoteError, match="no such run") as caught:
            await client.run("run-9")
    error = caught.value
    assert (error.reason, error.metadata, error.retry_seconds) == ("RUN_NOT_FOUND", {"run": "run-9"}, 0.5)
    assert RemoteError.reason == "INTERNAL"


def test_the_error_without_a_daemon_explains_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(NoDaemon, match="rollout daemon start"):
        local_server(tmp_path)


def test_repr_hides_the_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    (tmp_path / "rolloutd.json").write_text(json.dumps({"grpc": "a:1", "token_file": str(tmp_path / "token")}))
    assert "secret" not in repr(local_server(tmp_path))


def test_the_client_does_not_import_torch() -> None:
    code = "import sys, rollout.client; sys.exit('torch' in sys.modules or 'rollout_workers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
