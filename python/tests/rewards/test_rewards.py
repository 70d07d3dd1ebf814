"""A reward may raise, hang, crash, or return invalid results. Then its groups fail with a reason,
and nothing else fails."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from blake3 import blake3

from rollout.environment import Result
from rollout.plan.v1.plan_pb2 import INPUT_ROLE_REWARD, Input
from rollout.plugin import RewardImportError
from rollout_testing.waiting import until
from rollout_workers.rewards.composite import Composite, Part
from rollout_workers.rewards.pinned import Pinned, RewardChanged
from rollout_workers.rewards.plugin import RewardPool
from rollout_workers.rewards.rewards import RewardGroup, Rewards, Scorable

PLUGIN = """
import ctypes, os, sys, time

def score(samples):
    print("scoring", len(samples))
    return [_one(sample) for sample in samples]

def _one(sample):
    word = sample.row.get("do")
    if word == "raise":
        raise ValueError("bad sample")
    if word == "hang":
        time.sleep(600)
    if word == "spin":
        while True:
            pass
    if word == "crash":
        ctypes.string_at(0)
    if word == "exit":
        sys.exit(3)
    if word == "nan":
        return float("nan")
    if word == "once" and not os.path.exists(sample.row["file"]):
        open(sample.row["file"], "w").close()
        raise ValueError("the first time")
    return {"reward": float(len(sample.completion)), "prompt": len(sample.prompt)}

def plain(samples):
    return [float(sample.completion) for sample in samples]

async def asynchronous(samples):
    return [1.5 for _ in samples]
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    path = tmp_path / "reward.py"
    path.write_text(PLUGIN)
    return path


async def make(plugin: Path, function: str = "score", timeout: float = 20.0, retries: int = 0) -> Rewards:
    pool = RewardPool({"plugin": f"{plugin.name}:{function}", "base_dir": str(plugin.parent)})
    rewards = Rewards(pool, timeout_seconds=timeout, retries=retries)
    await rewards.start()
    return rewards


def group(do: str = "", *completions: str, file: str = "") -> RewardGroup:
    row = json.dumps({"do": do, "file": file})
    return RewardGroup(row.encode(), tuple(Scorable("17+25=", c) for c in completions or ("42", "4")))


async def test_returns_scores_and_metrics_in_order(plugin: Path) -> None:
    rewards = await make(plugin)
    assert await rewards.score([group("", "42", "4"), group("", "421")]) == [
        [Result(2.0, {"prompt": 6.0}), Result(1.0, {"prompt": 6.0})],
        [Result(3.0, {"prompt": 6.0})],
    ]
    await rewards.close()


async def test_shared_results_are_separate_for_each_sample(plugin: Path) -> None:
    rewards = await make(plugin, "plain")
    completions = ["0", "1", "-0.0", "1", "0", "-0.0", "0.25"]
    scored = await rewards.score([group("", *completions[:3]), group("", *completions[3:])])
    assert [repr(result.reward) for results in scored for result in results] == [repr(float(c)) for c in completions]
    await rewards.close()


async def test_an_async_function_is_supported(plugin: Path) -> None:
    rewards = await make(plugin, "asynchronous")
    assert await rewards.score([group()]) == [[Result(1.5), Result(1.5)]]
    await rewards.close()


@pytest.mark.parametrize(
    ("word", "reason", "timeout"),
    [
        ("raise", "REWARD_RAISED", 60.0),
        ("exit", "REWARD_RAISED", 60.0),
        ("crash", "REWARD_RAISED", 60.0),
        ("nan", "REWARD_BAD_RESULT", 60.0),
        ("hang", "REWARD_TIMEOUT", 3.0),  # the time limit for scoring the other groups
        ("spin", "REWARD_TIMEOUT", 3.0),
    ],
)
async def test_a_bad_group_does_not_fail_others(plugin: Path, word: str, reason: str, timeout: float) -> None:
    rewards = await make(plugin, timeout=timeout)
    good, bad, fine = await rewards.score([group(), group(word), group()])
    assert [result.outcome for result in good + fine] == ["completed"] * 4
    assert [result.reward for result in good] == [2.0, 1.0]
    assert [(result.outcome, result.reason, result.reward) for result in bad] == [("infra_failed", reason, 0.0)] * 2
    assert await rewards.score([group()]) == [[Result(2.0, {"prompt": 6.0}), Result(1.0, {"prompt": 6.0})]]
    await rewards.close()


async def test_a_hanging_reward_does_not_block_the_event_loop(plugin: Path) -> None:
    rewards = await make(plugin, timeout=1.0)
    hanging = asyncio.create_task(rewards.score([group("spin")]))
    turns = 0
    while not hanging.done():
        await asyncio.sleep(0.005)
        turns += 1
    assert hanging.result()[0][0].reason == "REWARD_TIMEOUT"
    assert turns > 5, "the loop keeps running while the reward holds its interpreter"
    await rewards.close()


async def test_a_temporary_failure_is_retried_and_logged(plugin: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rewards = await make(plugin, retries=1)
    [[one, _]] = await rewards.score([group("once", file=str(tmp_path / "seen"))])
    assert one.outcome == "completed"
    assert (rewards.retries, rewards.failures) == (1, 0)
    [message] = [record.getMessage() for record in caplog.records]
    assert message.startswith("a reward failed, but a retry succeeded") and "the first time" in message
    await rewards.close()


async def test_without_retries_a_temporary_failure_fails_the_sample(plugin: Path, tmp_path: Path) -> None:
    rewards = await make(plugin, retries=0)
    [[one, _]] = await rewards.score([group("once", file=str(tmp_path / "seen"))])
    assert one.reason == "REWARD_RAISED"
    await rewards.close()


async def test_groups_that_finish_during_a_call_are_scored_together(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = await make(plugin)
    sizes: list[int] = []
    call = rewards._call

    async def counted(groups: list[RewardGroup]) -> list[list[Result]]:
        sizes.append(len(groups))
        return await call(groups)

    monkeypatch.setattr(rewards, "_call", counted)
    await asyncio.gather(*(rewards.score([group()]) for _ in range(32)))
    assert sum(sizes) == 32 and len(sizes) <= 3
    await rewards.close()


async def test_a_plugin_that_cannot_be_imported_fails_at_the_start(plugin: Path) -> None:
    with pytest.raises(RewardImportError, match="no function `nothing`"):
        await make(plugin, "nothing")
    plugin.write_text("import a_module_that_is_not_there")
    with pytest.raises(RewardImportError, match="a_module_that_is_not_there"):
        await make(plugin)


async def test_closing_ends_the_process_and_fails_pending_calls(plugin: Path) -> None:
    rewards = await make(plugin, timeout=60)
    pool = rewards._source
    assert isinstance(pool, RewardPool)
    pid = pool._idle[0].pid
    waiting = asyncio.create_task(rewards.score([group("hang")]))
    await until(lambda: not pool._idle)
    await rewards.close()
    [[result, _]] = await waiting
    assert result.reason == "REWARD_CLOSED"
    await until(lambda: not _alive(pid))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("cut", [0, 3, 8, 20], ids=["between", "in a length", "after a length", "in a request"])
def test_a_reward_process_ends_with_its_worker(cut: int) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen([sys.executable, "-m", "rollout.hosting.child"], stdin=theirs.fileno())
    body = b"Load\0" + json.dumps([{"plugin": "reward.py:f", "base_dir": "/nowhere"}]).encode()
    ours.sendall((struct.pack("<Q", len(body)) + body)[:cut])
    ours.close()  # like a worker that was killed
    try:
        assert process.wait(60) == 0
    finally:
        process.kill()


async def test_a_reward_that_changed_since_the_plan_is_not_loaded(plugin: Path) -> None:
    """At the start it is refused. Later, when its process is restarted, the worker is told, and no
    sample is scored."""
    changes: list[str] = []
    planned = f"blake3-{blake3(plugin.read_bytes()).hexdigest()}"
    pinned = Pinned([Input(role=INPUT_ROLE_REWARD, path=plugin.name, digest=planned)], str(plugin.parent), changes.append)
    source = {"plugin": f"{plugin.name}:score", "base_dir": str(plugin.parent)}
    rewards = Rewards(RewardPool(source, pinned), timeout_seconds=20, retries=0)
    await rewards.start()
    plugin.write_text(PLUGIN + "\nscore = plain\n")
    assert [each.reason for each in (await rewards.score([group("crash", "42")]))[0]] == ["REWARD_RAISED"]
    assert [each.reason for each in (await rewards.score([group("", "42")]))[0]] == ["REWARD_CHANGED"]
    assert len(changes) == 1 and "restore the file" in changes[0]
    await rewards.close()
    with pytest.raises(RewardChanged, match=r"reward.py has changed since the run was planned"):
        await Rewards(RewardPool(source, pinned), timeout_seconds=20, retries=0).start()
    assert RewardChanged("x").permanent


async def test_the_age_of_a_call_that_has_not_returned_is_known(plugin: Path) -> None:
    rewards = await make(plugin, timeout=0.5)
    both = Composite([Part("a", 1.0, rewards), Part("b", 1.0, await make(plugin))])
    assert both.waiting_seconds == rewards.waiting_seconds == 0
    scoring = asyncio.create_task(rewards.score([group("hang", "42")]))
    async with asyncio.timeout(20):
        while not both.waiting_seconds >= 0.1 <= rewards.waiting_seconds:
            await asyncio.sleep(0.01)
    await scoring
    assert both.waiting_seconds == 0
    await both.close()
