"""The process of an environment is saved in a snapshot of a run, and continues on another host,
which is another network namespace. Needs CRIU and root (`make check-process`)."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from become import become
from conftest import ROOT
from sim import GROUPS, SAMPLES, Job, finish, sim_mesh, stop, submit

from rollout.environment import Task
from rollout.hosting import wire
from rollout.hosting.child import ChildProcess
from rollout.plugin.v1 import plugin_pb2 as pb

COUNTING = '''

class Counting(Game):
    """Counts the episodes that its process has begun, in memory alone."""

    begun = 0

    async def reset(self, task: Task) -> str:
        Counting.begun += 1
        prompt = await super().reset(task)
        return str(Counting.begun) if prompt == "how many" else prompt
'''


def missing() -> str:
    """Why this host can't save processes; empty if it can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "only root can save processes"
    return "" if (ROOT / "bin" / "criu").exists() else "criu is not built: run scripts/criu"


@pytest.fixture
def network() -> Iterator[str]:
    """The name of a network namespace."""
    name = f"rollout-moved-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


def rollout(state: Path, *arguments: str, network: str | None = None) -> Any:
    """What the command-line tool prints as JSON."""
    command = [str(ROOT / "bin" / "rollout"), "--state-dir", str(state), "--format", "json", *arguments]
    done = subprocess.run(become(command, namespace=network), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout)


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_process_of_a_run_continues_on_another_host(tmp_path: Path, network: str) -> None:
    here, there, files = tmp_path / "here", tmp_path / "there", tmp_path / "files"
    job = Job(tmp_path / "job", steps=20, turns=True, snapshot=1000)
    config = job.write()
    config.write_text(config.read_text().replace("game.py:Game", "game.py:Counting"))
    with (job.folder / "game.py").open("a") as game:
        game.write(COUNTING)
    running = sim_mesh(here, seconds=0.02).start()
    try:
        run = submit(running, running.plan(config), job)
        running.until_step(run, 2)
        taken = rollout(here, "snapshot", "create", run, "--kind", "process")["snapshots"][0]["snapshot_id"]
        finish(running, run)  # the processes continued after they were saved
        rollout(here, "snapshot", "export", taken, "--to", str(tmp_path / "moved.tar"))
    finally:
        stop(running)

    other = sim_mesh(there)
    other.namespace = network
    try:
        other.start()
        inputs = ("--inputs", str(tmp_path / "inputs"))
        moved = rollout(there, "snapshot", "import", str(tmp_path / "moved.tar"), *inputs, network=network)["snapshot_id"]
        written = rollout(there, "snapshot", "extract", moved, "--to", str(files), "--path", "processes", network=network)
    finally:
        stop(other)
    assert written["images"]
    for path in files.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, f"others can read {path}"
    # Each process answers with one more episode than those that it remembers.
    remembered = [asyncio.run(begun(job, image, network)) - 1 for image in written["images"]]
    assert sum(remembered) >= 2 * GROUPS * SAMPLES, f"the processes remember {remembered} episodes"


async def begun(job: Job, image: str, network: str) -> int:
    """How many episodes a process has begun, which is restored in a network namespace."""
    process = ChildProcess([{"kind": "environment", "plugin": "game.py:Counting", "base_dir": str(job.folder)}])
    await process.restore(image, network=f"/run/netns/{network}")
    try:
        assert os.stat(f"/proc/{process.pid}/ns/net").st_ino == os.stat(f"/run/netns/{network}").st_ino
        task = Task("asked", json.dumps({"prompt": "how many"}).encode(), (0,), (7,))
        request = pb.ResetEnvironmentRequest(plugin="Counting", tasks=[wire.task_to(task)])
        answer = await process.call("ResetEnvironment", request, 60)
        return int(getattr(wire.start_from(answer.starts[0]), "text", ""))
    finally:
        await process.close()
