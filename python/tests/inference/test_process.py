"""The worker as a process: its start, its exit, and its work after a kill."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollout.plan.v1.plan_pb2 import Plan
from rollout.run.v1.run_pb2 import WorkerSpec
from rollout_testing.daemon import Daemon
from rollout_testing.run import Example, RunStreams, by_key, config, prompt_group, spec, write_spec
from rollout_testing.waiting import until
from rollout_testing.worker import InProcess, Process, registered
from rollout_workers.engines.registry import UnknownEngine
from rollout_workers.inference.model import load
from rollout_workers.worker.credential import Token
from rollout_workers.worker.registration import Registration
from rollout_workers.worker.spec import Identity

HANGS = """
import time

def score(samples):
    time.sleep(600)
"""


@pytest.fixture
async def processes() -> AsyncIterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.end()


async def test_work_of_a_killed_worker_is_done_by_another(
    daemon: Daemon, example: Example, run: str, streams: RunStreams, tmp_path: Path, processes: list[Process]
) -> None:
    """The first worker has sampled and waits for its reward. The second one gets the work after the
    ack wait."""
    (tmp_path / "hangs.py").write_text(HANGS)
    hanging = config(example, reward={"plugin": f"{tmp_path / 'hangs.py'}:score", "timeout_seconds": 600.0})
    first = Process(spec(daemon, hanging, run=run), tmp_path)
    processes.append(first)
    await first.registered()
    rows = example.rows(8)
    await streams.issue([prompt_group(i, rows[i], run=run) for i in range(8)])
    await until(lambda: _pending(streams, 8))
    second = await InProcess(spec(daemon, config(example), run=run, number=1)).start()
    first.process.send_signal(signal.SIGKILL)
    envelopes = await streams.collect(32)
    assert set(by_key(envelopes)) == {(0, i, 0, s) for i in range(8) for s in range(4)}
    assert {envelope.header.worker_id for envelope in envelopes} == {"inference-1"}
    await second.stop()
    assert await streams.work_left() == 0
    await until(lambda: registered(first.spec) is None)


async def test_sigterm_drains_and_deregisters(
    daemon: Daemon, example: Example, run: str, streams: RunStreams, tmp_path: Path, processes: list[Process]
) -> None:
    process = Process(spec(daemon, config(example), run=run), tmp_path)
    processes.append(process)
    entry = await process.registered()
    assert entry["Meta"]["incarnation"] == "1"
    await streams.issue([prompt_group(0, example.rows(1)[0], run=run)])
    assert len(await streams.collect(4)) == 4
    process.process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0
    assert registered(process.spec) is None
    assert "finishing work in progress" in process.log.read_text()


async def test_the_worker_exits_when_stdin_closes(
    daemon: Daemon, example: Example, run: str, tmp_path: Path, processes: list[Process]
) -> None:
    process = Process(spec(daemon, config(example), run=run), tmp_path)
    processes.append(process)
    await process.registered()
    assert process.process.stdin is not None
    process.process.stdin.close()
    assert await process.wait() == 0


async def test_a_second_sigterm_exits_at_once(
    daemon: Daemon, example: Example, run: str, streams: RunStreams, tmp_path: Path, processes: list[Process]
) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    hanging = config(example, reward={"plugin": f"{tmp_path / 'hangs.py'}:score", "timeout_seconds": 600.0})
    process = Process(spec(daemon, hanging, run=run), tmp_path)
    processes.append(process)
    await process.registered()
    await streams.issue([prompt_group(0, example.rows(1)[0], run=run)])
    await until(lambda: _pending(streams, 1))
    process.process.send_signal(signal.SIGTERM)
    await until(lambda: "finishing work in progress" in process.log.read_text())
    assert process.process.poll() is None
    process.process.send_signal(signal.SIGTERM)
    assert await process.wait() == 130


async def test_a_newer_incarnation_fences_the_older(
    daemon: Daemon, example: Example, run: str, tmp_path: Path, processes: list[Process]
) -> None:
    old = Process(spec(daemon, config(example), run=run), tmp_path)
    processes.append(old)
    await old.registered()
    learner = Identity(run, "learner-0", "learner", 2)
    new = Registration(learner, agent=daemon.consul, consul_token=Token(daemon.token), address="127.0.0.1:1")
    await asyncio.to_thread(new.start)
    assert await old.wait() == 3
    assert "incarnation 2" in old.log.read_text()
    await asyncio.to_thread(new.stop)


async def test_a_worker_that_cannot_start_logs_the_reason(
    daemon: Daemon, example: Example, run: str, tmp_path: Path, processes: list[Process]
) -> None:
    missing = config(example, model={"path": "/no/such/model"})
    broken = config(example, reward={"plugin": f"{tmp_path / 'none.py'}:score"})
    for number, run_config in enumerate((missing, broken)):
        processes.append(Process(spec(daemon, run_config, run=run, number=number), tmp_path))
    codes = await asyncio.gather(*(process.wait(90) for process in processes))
    assert codes == [1, 1]
    assert "/no/such/model" in processes[0].log.read_text()
    assert "can't read" in processes[1].log.read_text()


async def test_a_version_that_the_learner_has_removed_is_replaced_by_the_newest(
    daemon: Daemon, example: Example, run: str, tmp_path: Path, processes: list[Process]
) -> None:
    weights = tmp_path / "weights"
    shutil.copytree(example.model, weights / "v000003")
    (weights / "v000004").symlink_to(tmp_path / "freed memory")
    for number, version in enumerate((1, 7)):
        wanted = spec(daemon, config(example), run=run, number=number)
        wanted.initial_weights, wanted.initial_version = str(weights / f"v{version:06d}"), version
        processes.append(Process(wanted, tmp_path))
    await processes[0].registered()
    assert "loaded weights version 3" in processes[0].log.read_text()
    assert await processes[1].wait(90) == 1, "version 3 is older than the one to load"


async def test_a_spec_of_another_kind_is_rejected(daemon: Daemon, example: Example, run: str, tmp_path: Path) -> None:
    import sys

    file = write_spec(tmp_path / "spec.json", spec(daemon, config(example), run=run))
    asked = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollout_workers", "learner", "--spec", str(file), stderr=asyncio.subprocess.PIPE
    )
    _, output = await asked.communicate()
    assert asked.returncode == 64
    assert b"has the kind `inference`" in output


async def _pending(streams: RunStreams, items: int) -> bool:
    info = await streams.js.consumer_info(f"WORK_{streams.run}", "workers")
    return info.num_ack_pending == items


def test_the_error_for_an_unknown_engine_names_it(example: Example) -> None:
    newer = config(example)
    newer.engine.kind = "another"
    with pytest.raises(UnknownEngine, match="engine 'another' is unknown"):
        load(WorkerSpec(plan=Plan(config=newer), base_dir="/"))
