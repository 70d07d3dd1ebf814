"""An agent with the plain OpenAI client plays games in sessions of the gateway, and the run is
trained on them. The gateway exits between every two durable effects of the end of a session, and
each sample is in the ledger once."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT
from mesh import Mesh, assert_consumed_once, mesh, until

EXAMPLE = ROOT / "examples" / "agent_openai"
STEPS, GROUPS, SAMPLES = 4, 2, 4
SMALL = (
    f"train.steps={STEPS}",
    f"train.groups_per_step={GROUPS}",
    f"sampling.group_size={SAMPLES}",
    "limits.group_attempts=20",
)
POINTS = ("gateway/closed", "gateway/put", "gateway/settled")


@pytest.fixture(scope="module")
def games() -> Path:
    subprocess.run([sys.executable, str(EXAMPLE / "prepare.py")], check=True)
    return EXAMPLE / "grpo.toml"


@contextlib.contextmanager
def agent(running: Mesh, run: str) -> Iterator[subprocess.Popen[str]]:
    """The agent of the example, which ends with the run."""
    server = running.daemon("rollout-gateway")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "ROLLOUT_API_KEY": running.token()}
    command = [sys.executable, str(EXAMPLE / "agent.py"), run, "--server", str(server["grpc"])]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_an_agent_trains_a_run(games: Path, tmp_path: Path) -> None:
    with mesh(tmp_path) as running:
        run = running.submit(games, *SMALL)
        with agent(running, run) as process:
            running.finish(run)
            assert process.wait(60) == 0, process.communicate()
        assert_consumed_once(running, run, steps=STEPS, groups_per_step=GROUPS, group_size=SAMPLES)
        ledger = running.ledger(run)[2]
        assert ledger.refused == ledger.infra_failed == ledger.duplicates == 0, ledger


@pytest.fixture(scope="module")
def binary() -> Path:
    """`rolloutd` compiled with the crash points."""
    path = ROOT / "bin" / "crashpoint" / "rolloutd"
    command = ["go", "build", "-tags", "crashpoint", "-trimpath", "-o", f"{path.parent}/", "./rolloutd"]
    subprocess.run(command, cwd=ROOT / "cmd", check=True)
    return path


def test_the_gateway_exits_between_the_end_of_a_session_and_its_acknowledgement(
    games: Path, binary: Path, tmp_path: Path
) -> None:
    order = tmp_path / "order"
    worker = ("--worker-command", f"{sys.executable} -m rollout_workers", "--worker-python", sys.executable)
    environment = {"ROLLOUT_CRASH_FILE": str(order), "PYTHONPATH": str(ROOT / "python")}
    running = Mesh(tmp_path / "state", "seven", arguments=worker, environment=environment, binary=binary)
    running.state.mkdir()
    try:
        running.start()
        run = running.submit(games, *SMALL)
        with agent(running, run) as process:
            for point in POINTS:
                order.with_name("order.done").unlink(missing_ok=True)
                order.write_text(point)
                gateway = running.processes["rollout-gateway"]
                until(lambda gateway=gateway: gateway.poll() is not None, point, 120)
                running.start_service("rollout-gateway")
            running.finish(run)
            assert process.wait(120) == 0, process.communicate()
        # a request that the agent repeats after an exit may be another branch of its session
        assert_consumed_once(running, run, steps=STEPS, groups_per_step=GROUPS, group_size=SAMPLES, forks=True)
        running.stop()
    finally:
        for each in running.processes.values():
            each.kill()
