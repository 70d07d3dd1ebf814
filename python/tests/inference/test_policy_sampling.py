"""Episodes of tensors in an inference worker: rows, environments, and envelopes."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rollout.environment import Result, Task
from rollout.run.v1.run_pb2 import PromptGroup, WorkerSpec
from rollout_workers.inference import policy_sampling
from rollout_workers.inference.policy_sampling import PlayedGroup, PlayRunner, PlaySampler, Policy, read_row, start_playing
from rollout_workers.inference.receipt import EngineReceipts
from rollout_workers.multistep.actor_critic import ActorCritic, ActorCriticConfig
from rollout_workers.multistep.engine import PolicyEngine
from rollout_workers.multistep.player import Played

WORLD = """import time


class World:
    def __init__(self):
        time.sleep(SLEEP)

    def reset(self, *, seed=None, options=None):
        return [0.0, float((options or {}).get("wind", 0)), 0.0, float(seed)], {}

    def step(self, action):
        return [1.0, 0.0, 0.0, 0.0], 1.0, True, False, {}
"""


def spec(folder: Path, sleep: float = 0.0) -> WorkerSpec:
    (folder / "world.py").write_text(WORLD.replace("SLEEP", str(sleep)))
    made = WorkerSpec(worker_id="inference-0", base_dir=str(folder))
    config = made.plan.config
    config.deterministic, config.engine.workers, config.environment.turn_timeout_seconds = True, 1, 20.0
    table = config.multistep
    table.environment, table.environments, table.chunk, table.max_steps = "world.py:World", 2, 1, 5
    return made


def policy() -> Policy:
    torch.manual_seed(0)
    module = ActorCritic(ActorCriticConfig(hidden_size=8, layers=1)).eval()
    return Policy(PolicyEngine(module, version=0, slots=2), module)


async def test_a_malformed_row_fails_its_own_group_only(tmp_path: Path) -> None:
    playing = await start_playing(spec(tmp_path), policy(), cast(Any, None))
    sampled: list[str] = []
    runner = PlayRunner(playing.player, sampled.append)
    rows = [b'{"seed": 3, "options": {"wind": 2}}', b"{", b'{"seed": "three"}', b"[1]", b'{"options": 2}', b'{"seed": null}']
    tasks = [Task(str(number), row, (0, 1), (5, 6)) for number, row in enumerate(rows)]
    async with asyncio.timeout(20):
        groups = {group.task.key: group async for finished in runner.run(tasks) for group in finished}
    for task in playing.tasks:
        task.cancel()
    results = {key: {(e.result.outcome, e.result.reason) for e in g.episodes if e.result} for key, g in groups.items()}
    failed = {("infra_failed", "ROW_INVALID")}
    assert results == {"0": {("completed", "")}, **{str(n): failed for n in (1, 2, 3, 4)}, "5": {("completed", "")}}
    assert groups["0"].episodes[0].tensors["inputs.states"][0].tolist() == [0.0, 2.0, 0.0, 3.0]
    assert sorted(sampled) == sorted([*"012345"] * 2)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b"{", "the row is not JSON: Expecting property name"),
        (b"3", "the row is a int, not an object"),
        (b'{"seed": 1.5}', "`seed` of the row is 1.5, not an integer of at least 0"),
        (b'{"seed": -1}', "`seed` of the row is -1, not an integer of at least 0"),
        (b'{"seed": true}', "`seed` of the row is true, not an integer of at least 0"),
        (b'{"options": [1]}', r"`options` of the row is \[1\], not an object"),
    ],
)
def test_what_is_wrong_with_a_row_is_named(row: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        read_row(row)


async def test_the_event_loop_runs_while_environments_are_made(tmp_path: Path) -> None:
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0.01)

    beating = asyncio.create_task(beat())
    playing = await start_playing(spec(tmp_path, sleep=0.5), policy(), cast(Any, None))
    assert beats > 5
    for task in (beating, *playing.tasks):
        task.cancel()


async def test_tensors_are_encoded_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    encode = policy_sampling.encode_played

    def recorded(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return encode(*arguments)

    monkeypatch.setattr(policy_sampling, "encode_played", recorded)
    receipts = EngineReceipts(policy().engine)
    receipts.current.version, receipts.current.digest = 4, "blake3-aa"
    unused = cast(Any, None)
    sampler = PlaySampler(cast(Any, SimpleNamespace(worker="inference-0")), unused, receipts, unused, unused, unused)
    played = Played("0/0/0", 0, 1, {}, result=Result(reward=2.0), tensors={"values": torch.ones(1, 1)}, versions=[4], steps=1)
    task = Task("0/0/0", b"{}", (0,), (1,))
    (envelope,) = await sampler.encode(PromptGroup(run_id="r", group_size=1), PlayedGroup(task, (played,)))
    assert threads and threads[0] is not threading.main_thread()
    assert (envelope.header.receipt.version, envelope.header.receipt.digest, envelope.header.reward) == (4, "blake3-aa", 2.0)
