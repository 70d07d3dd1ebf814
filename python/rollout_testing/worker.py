"""Runs workers in the test's process or as separate processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from rollout import names
from rollout.run.v1.run_pb2 import WorkerSpec
from rollout_testing.run import write_spec
from rollout_testing.services import passing
from rollout_testing.waiting import until
from rollout_workers.worker.credential import of_server
from rollout_workers.worker.events import Events
from rollout_workers.worker.heartbeat import Heartbeat
from rollout_workers.worker.lifecycle import Lifecycle
from rollout_workers.worker.spec import SPEC_VARIABLE, identity


class InProcess:
    """A worker on the test's event loop, without a separate process."""

    def __init__(self, spec: WorkerSpec, **given: Any) -> None:
        """given: arguments for the worker's ``run_.._worker``."""
        self.spec, self._given = spec, given
        self.who = identity(spec)
        self.lifecycle = Lifecycle()
        token = of_server(spec, spec.nats_token)
        self._heartbeat = Heartbeat(spec.nats_url, token, name=self.who.registration, run=self.who.run, access=spec.nats)
        self.events = Events(self.who, self._heartbeat)
        self.task: asyncio.Task[None] | None = None
        self.channel: grpc.aio.Channel | None = None

    async def start(self) -> InProcess:
        """Wait until the worker is registered."""
        self._heartbeat.start()
        self.events.start()
        if self.who.kind == "inference":
            from rollout_workers.inference.worker import run_inference_worker as run
        else:
            from rollout_workers.learner.worker import run_learner_worker as run
        self.task = asyncio.create_task(run(self.spec, self.who, self.lifecycle, self._heartbeat, self.events, **self._given))
        entry = await until(self._entry)
        self.channel = grpc.aio.insecure_channel(f"{entry['Address']}:{entry['Port']}")
        return self

    async def stop(self) -> int:
        """Drain the worker. Returns the exit code that its process would have."""
        self.lifecycle.drain()
        return await self.ended()

    async def ended(self) -> int:
        """Return when the worker has exited on its own."""
        assert self.task is not None
        async with asyncio.timeout(60):
            await self.task
        if self.channel is not None:
            await self.channel.close()
        await asyncio.to_thread(self.events.close)
        await asyncio.to_thread(self._heartbeat.stop)
        return self.lifecycle.exit_code

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of calls, with the token."""
        return (("authorization", f"Bearer {self.spec.peer_token}"),)

    def _entry(self) -> dict[str, Any] | None:
        if self.task is not None and self.task.done():
            self.task.result()
            raise RuntimeError("the worker exited")
        return registered(self.spec, self.who.process)


class Process:
    """A worker that is started like by the scheduler: ``rollout-worker KIND``, a spec file, and a
    pipe on stdin."""

    def __init__(self, spec: WorkerSpec, folder: Path) -> None:
        self.spec = spec
        self.log = folder / f"{spec.worker_id}.log"
        file = write_spec(folder / f"{spec.worker_id}.json", spec)
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rollout_workers", spec.kind],
                env={**os.environ, SPEC_VARIABLE: str(file)},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )

    async def registered(self, seconds: float = 90) -> dict[str, Any]:
        """The worker's entry in the registry, once it has registered."""
        return await until(self._entry, seconds)

    async def wait(self, seconds: float = 60) -> int:
        """Its exit code."""
        return await asyncio.to_thread(self.process.wait, seconds)

    def end(self) -> None:
        """Kill the process if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(60)
        if self.process.stdin is not None:
            self.process.stdin.close()

    def _entry(self) -> dict[str, Any] | None:
        if self.process.poll() is not None:
            raise RuntimeError(f"the worker exited with code {self.process.returncode}: {self.log.read_text()[-3000:]}")
        entry = registered(self.spec)
        return entry if entry and entry["Meta"]["pid"] == str(self.process.pid) else None


def registered(spec: WorkerSpec, process: str | None = None) -> dict[str, Any] | None:
    """The entry of a worker in the registry."""
    for entry in passing(_Agent(spec.consul_address, spec.consul_token), names.worker_service(spec.kind)):
        meta = entry["Meta"]
        if (meta["run"], meta["worker"]) == (spec.run_id, spec.worker_id) and process in (None, meta["process"]):
            return entry
    return None


@dataclass(frozen=True)
class _Agent:
    consul: str
    token: str
