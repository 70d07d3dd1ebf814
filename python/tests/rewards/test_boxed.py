"""Rewards in boxes: what a reward can't reach, and how the limits of its sandbox are reported."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest

from rollout.config.v1.run_config_pb2 import RewardConfig
from rollout.environment import Result
from rollout.hosting.boxed import BoxLimits, RewardLimitNotEnforceable, check_host
from rollout.hosting.look import Look, looks
from rollout.plugin import RewardError
from rollout.sandbox import Enforcement, Report, Sandbox
from rollout_testing.daemon import sandbox_binary
from rollout_workers.rewards.config import scorer_of
from rollout_workers.rewards.plugin import RewardPool
from rollout_workers.rewards.rewards import RewardGroup, Rewards, Scorable

PLUGIN = '''
import os, signal, socket, subprocess, sys, time
from helper import length

left = []

def score(samples):
    row = next((s.row for s in samples if s.row["do"] != "fine"), samples[0].row)
    return globals()[row.get("do", "fine")](samples, row.get("at", ""))

def fine(samples, at):
    return [{"reward": float(length(s.completion)), "pid": float(os.getpid())} for s in samples]

def read(samples, at):
    open(at).read()

def readable(samples, at):
    """1 if a path, or the environment of another process, can be read."""
    found = os.path.exists(at) or any("ROLLOUT_TOKEN" in open(f"/proc/{pid}/environ").read()
                                      for pid in os.listdir("/proc") if pid.isdigit() and pid != "1")
    return [float(found) for _ in samples]

def connect(samples, at):
    socket.create_connection(("127.0.0.1", int(at)), timeout=5)

def name(samples, at):
    socket.getaddrinfo("judge.example", 443)

def forks(samples, at):
    while True:
        os.fork()

def memory(samples, at):
    while True:
        left.append(b"x" * (8 << 20))

def disk(samples, at):
    with open("/tmp/file", "wb") as file:
        while True:
            file.write(b"x" * (1 << 20))

def output(samples, at):
    while True:
        print("x" * 1000)

def hang(samples, at):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sleep", "86395"], start_new_session=True)
    time.sleep(600)

def pauses(samples, at):
    time.sleep(5)  # here
    return fine(samples, at)

def killed(samples, at):
    os.kill(os.getpid(), signal.SIGKILL)

def forged(samples, at):
    for fd in range(3, 64):
        try:
            os.write(fd, b"\\xff" * 64)
        except OSError:
            pass
    return fine(samples, at)

def wrong(samples, at):
    raise KeyError("answer")
'''


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform != "linux":
        pytest.skip("sandboxes need Linux")
    monkeypatch.setenv("ROLLOUT_SANDBOX", sandbox_binary())
    monkeypatch.setenv("ROLLOUT_TOKEN", "mesh-token")
    report = Sandbox.probe()
    if not report.ok:
        pytest.skip(f"this host builds no sandboxes: {report.error}")


@pytest.fixture
def source(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "reward.py").write_text(PLUGIN)
    (tmp_path / "helper.py").write_text("length = len\n")
    (tmp_path / ".env").write_text("TOKEN=mesh-token")
    return {"plugin": "reward.py:score", "base_dir": str(tmp_path)}


@contextlib.asynccontextmanager
async def scoring(source: dict[str, str], seconds: float = 60.0, **limits: int) -> AsyncGenerator[Rewards]:
    rewards = Rewards(RewardPool(source, box=BoxLimits(**limits)), timeout_seconds=seconds, retries=0)
    try:
        await rewards.start()
        yield rewards
    finally:
        await rewards.close()


def group(do: str = "fine", at: str = "") -> RewardGroup:
    return RewardGroup(json.dumps({"do": do, "at": at}).encode(), (Scorable("1+1=", "42"), Scorable("1+1=", "4")))


async def one(rewards: Rewards, do: str, at: str = "") -> Result:
    [[first, _]] = await rewards.score([group(do, at)])
    return first


async def test_a_reward_is_scored_by_one_warm_process(source: dict[str, str]) -> None:
    async with scoring(source) as rewards:
        first, second = await one(rewards, "fine"), await one(rewards, "fine")
        assert first.reward == 2.0
        assert first.metrics == second.metrics, "the process is kept"
        bad = await one(rewards, "wrong")
        assert (bad.outcome, bad.reason) == ("infra_failed", "REWARD_RAISED")
        assert (await one(rewards, "fine")).metrics == first.metrics


async def test_files_and_processes_of_the_host_are_not_in_the_box(source: dict[str, str]) -> None:
    token = Path(source["base_dir"], "home", "token")
    async with scoring(source) as rewards:
        for path in ("/etc/shadow", str(token), str(Path(source["base_dir"], ".env")), f"/proc/{os.getppid()}"):
            assert (await one(rewards, "readable", path)).reward == 0.0, path
        assert (await one(rewards, "read", "/etc/shadow")).reason == "REWARD_RAISED"


@pytest.fixture
def service() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server.getsockname()[1]
        with pytest.raises(BlockingIOError):
            server.accept()


async def test_services_of_the_host_are_out_of_reach(source: dict[str, str], service: int) -> None:
    async with scoring(source) as rewards:
        assert (await one(rewards, "connect", str(service))).reason == "REWARD_NO_NETWORK"
        assert (await one(rewards, "name")).reason == "REWARD_NO_NETWORK"


@pytest.mark.parametrize(
    ("do", "reasons"),
    [
        ("forks", {"REWARD_PIDS_LIMIT"}),
        ("memory", {"REWARD_OUT_OF_MEMORY"}),
        ("disk", {"REWARD_DISK_LIMIT"}),
        ("output", {"REWARD_OUTPUT_LIMIT"}),
        ("killed", {"REWARD_KILLED"}),
        ("forged", {"REWARD_KILLED"}),
    ],
)
async def test_a_limit_fails_the_samples_of_its_call_only(source: dict[str, str], do: str, reasons: set[str]) -> None:
    limits = {"memory_bytes": 256 << 20, "pids": 32, "disk_bytes": 8 << 20, "output_bytes": 1 << 20}
    async with scoring(source, **limits) as rewards:
        good, bad = await rewards.score([group(), group(do)])
        assert [result.reward for result in good] == [2.0, 1.0]
        assert {result.outcome for result in bad} == {"infra_failed"}
        assert {result.reason for result in bad} <= reasons
        assert (await one(rewards, "fine")).reward == 2.0, "the next call has another box"


async def test_a_call_that_takes_too_long_is_killed_with_all_it_started(source: dict[str, str]) -> None:
    async with scoring(source, seconds=3.0) as rewards:
        assert (await one(rewards, "hang")).reason == "REWARD_TIMEOUT"
        lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
        assert not any(b"86395" in line for line in lines)
        assert (await one(rewards, "fine")).reward == 2.0


async def test_the_line_of_a_call_in_a_box_is_seen(source: dict[str, str]) -> None:
    async with scoring(source) as rewards:
        await one(rewards, "fine")
        call = asyncio.create_task(one(rewards, "pauses"))
        seen: list[Look] = []
        while not call.done() and not any(look.at for look in seen):
            await asyncio.sleep(0.05)
            seen = [look for look in await looks(0.0) if look.method == "Reward" and not look.pid]
        assert seen and seen[0].at is not None, seen
        assert PLUGIN.splitlines()[seen[0].at.line - 1].endswith("# here"), seen
        assert seen[0].at.function == "pauses"
        assert (await call).reward == 2.0, "the call is not disturbed"
        assert await looks(0.0) == []


async def test_a_cancelled_call_does_not_answer_the_next_one(source: dict[str, str]) -> None:
    async with scoring(source) as rewards:
        await one(rewards, "fine")
        pool = rewards._source  # pyright: ignore[reportPrivateUsage]
        slow = asyncio.create_task(pool.call([group("hang")], 60.0))
        await asyncio.sleep(0.3)
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        assert [score.reward for score in await pool.call([group()], 60.0)] == [2.0, 1.0]


async def test_a_reward_that_can_not_be_loaded_is_reported(source: dict[str, str]) -> None:
    Path(source["base_dir"], "reward.py").write_text("import missing_module\n")
    with pytest.raises(RewardError, match="missing_module"):
        async with scoring(source):
            pass


def test_a_limit_that_the_host_can_not_enforce_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = (Enforcement("cpus", "none", why="no cgroups", fix="run it as root"),)
    by = tuple(Enforcement(name, "rlimit") for name in ("memory_bytes", "pids", "output_bytes", "disk_bytes"))
    monkeypatch.setattr(Sandbox, "probe", staticmethod(lambda: Report(True, "6", False, (*limits, *by), ())))
    check_host(BoxLimits())
    with pytest.raises(RewardLimitNotEnforceable, match=r"`reward.limits.cpus` can't be enforced on this host: no cgroups"):
        check_host(BoxLimits(cpus=1.0))


async def test_the_configuration_chooses_the_rewards_with_boxes(source: dict[str, str]) -> None:
    """A part may differ from the others: a judge that asks an endpoint has no box."""
    config = RewardConfig(timeout_seconds=60.0, sandbox=True)
    config.limits.memory_bytes, config.limits.pids, config.limits.output_bytes, config.limits.disk_bytes = (
        1 << 30,
        64,
        1 << 20,
        8 << 20,
    )
    for name, boxed in (("safe", True), ("judge", False)):
        part = config.composite[name]
        part.weight, part.plugin = 1.0, source["plugin"]
        if not boxed:
            part.sandbox = False
    scorer = scorer_of(config, source["base_dir"], lambda number: pytest.fail("no model expected"))
    await scorer.start()
    try:
        row = json.dumps({"do": "readable", "at": "/etc/shadow"}).encode()
        [[result]] = await scorer.score([RewardGroup(row, (Scorable("", "42"),))])
        assert (result.metrics["reward/safe"], result.metrics["reward/judge"]) == (0.0, float(os.path.exists("/etc/shadow")))
    finally:
        await scorer.close()
