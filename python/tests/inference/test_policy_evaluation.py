"""Evaluations of a policy that acts in environments."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from rollout.inference.v1 import inference_pb2 as pb
from rollout.run.v1.run_pb2 import WorkerSpec
from rollout.trajectory.v1 import trajectory_pb2
from rollout_workers.inference.evaluation import NoEvaluation, WeightsVersionMismatch
from rollout_workers.inference.policy_evaluation import PlayEvaluation
from rollout_workers.inference.policy_sampling import Playing, Policy, start_playing, worker_config
from rollout_workers.inference.receipt import EngineReceipts
from rollout_workers.multistep.actor_critic import ActorCritic
from rollout_workers.multistep.settings import read_settings

from .test_policy_sampling import policy

WORLD = """class World:
    def reset(self, *, seed=None, options=None):
        if options:
            raise ValueError("no wind today")
        self.seed, self.steps = seed % 1000, 0
        return [0.0, 0.0, 0.0, float(self.seed)], {}

    def step(self, action):
        self.steps += 1
        return [0.0, float(self.steps), 0.0, float(self.seed)], float(action), self.steps > self.seed % 4, False, {}
"""
ROWS = [b'{"seed": %d}' % seed for seed in (5, 6, 7, 2)]


def spec(folder: Path, environment_workers: int = 0) -> WorkerSpec:
    (folder / "world.py").write_text(WORLD)
    made = WorkerSpec(worker_id="inference-1", base_dir=str(folder))
    config = made.plan.config
    config.deterministic, config.engine.workers, config.eval.workers = True, 2, 1
    config.environment.turn_timeout_seconds = 20.0
    table = config.multistep
    table.environment, table.environments, table.chunk, table.max_steps = "world.py:World", 2, 1, 5
    table.environment_workers = environment_workers
    return made


class Evaluated:
    """A worker's evaluation, with the players that it started."""

    def __init__(self, folder: Path, rows: list[bytes], model: Policy | None = None, environment_workers: int = 0) -> None:
        (folder / "rows.jsonl").write_bytes(b"\n".join(rows) + b"\n")
        self.model, self.playing = model or policy(), list[Playing]()
        self.receipts = EngineReceipts(self.model.engine)
        self.receipts.version = 0

        async def start() -> Playing:
            made = await start_playing(spec(folder, environment_workers), self.model, cast(Any, None), "eval")
            self.playing.append(made)
            return made

        self.evaluation = PlayEvaluation(str(folder / "rows.jsonl"), self.receipts, start)

    async def __call__(self, **request: Any) -> list[pb.EvalSample]:
        async with asyncio.timeout(30):
            chunks = [chunk async for chunk in self.evaluation.evaluate(pb.EvaluateRequest(run_id="r", **request))]
        return [sample for chunk in chunks for sample in chunk.samples]

    def close(self) -> None:
        for playing in self.playing:
            for task in playing.tasks:
                task.cancel()


def greedy(module: ActorCritic, seed: int) -> tuple[float, int]:
    """The return and the steps of an episode of most likely actions."""
    total = 0.0
    for step in range(seed % 4 + 1):
        states = torch.tensor([[0.0, float(step), 0.0, float(seed)]])
        total += float(module.predict_action_batch({"states": states}, "eval")[0][0, 0])
    return total, seed % 4 + 1


async def test_episodes_of_held_out_rows_are_played_with_the_most_likely_actions(tmp_path: Path) -> None:
    """Also with environment workers, which play for training."""
    evaluated = Evaluated(tmp_path, ROWS, environment_workers=1)
    try:
        samples = await evaluated()
        assert [(s.row, s.reward, s.metrics["steps"]) for s in samples] == [
            (row, *greedy(evaluated.model.policy, seed)) for row, seed in enumerate((5, 6, 7, 2))
        ]
        assert {s.outcome for s in samples} == {trajectory_pb2.OUTCOME_COMPLETED}
        assert samples[1].prompt == '{"seed": 6}' and samples[1].completion == f"3 steps, return {samples[1].reward:g}"
        assert [s.row for s in await evaluated(max_prompts=3)] == [0, 1, 2]
        parts = [await evaluated(parts=2, part=part) for part in (0, 1)]
        assert [[s.row for s in part] for part in parts] == [[0, 2], [1, 3]]
        assert sorted([s.reward for s in [*parts[0], *parts[1]]]) == sorted(s.reward for s in samples)
        assert len(evaluated.playing) == 1 and evaluated.evaluation.running == 0
        assert evaluated.model.engine.played == 0 and not evaluated.evaluation.doing()
    finally:
        evaluated.close()


async def test_rows_without_a_seed_have_the_same_one_in_each_evaluation(tmp_path: Path) -> None:
    evaluated = Evaluated(tmp_path, [b"{}"] * 6)
    try:
        first, second = await evaluated(seed=3), await evaluated(seed=3)
        assert [s.completion for s in first] == [s.completion for s in second]
        assert len({s.metrics["steps"] for s in first}) > 1
    finally:
        evaluated.close()


async def test_failures_are_no_returns(tmp_path: Path) -> None:
    evaluated = Evaluated(tmp_path, [ROWS[0], b"[]", b'{"options": {"wind": 1}}'])
    try:
        found = [(s.outcome, s.reason) for s in await evaluated()]
    finally:
        evaluated.close()
    failed = trajectory_pb2.OUTCOME_INFRA_FAILED
    assert found == [
        (trajectory_pb2.OUTCOME_COMPLETED, ""),
        (failed, "ROW_INVALID"),
        (failed, "ENVIRONMENT_FAILED"),
    ]


async def test_only_the_requested_version_is_evaluated(tmp_path: Path) -> None:
    evaluated = Evaluated(tmp_path, ROWS)
    try:
        with pytest.raises(WeightsVersionMismatch, match="for weights version 4, but the engine uses 0"):
            await evaluated(version=4)
        with pytest.raises(NoEvaluation, match="no suite `sums`"):
            await evaluated(suite="sums")
        evaluated.model.engine.version = 1  # swapped while episodes are played
        with pytest.raises(WeightsVersionMismatch, match="for weights version 0, but the engine uses 1"):
            await evaluated()
        evaluated.model.engine.version = 0
        assert len(await evaluated()) == len(ROWS)
    finally:
        evaluated.close()


def test_reserved_workers_have_no_environments_of_the_training(tmp_path: Path) -> None:
    config = spec(tmp_path).plan.config
    config.engine.workers, config.multistep.environments = 3, 8
    train, evaluated = (read_settings(worker_config(config, 1, mode)) for mode in ("train", "eval"))
    assert (train.world_size, [peer.rows for peer in train.peers["train"]], "eval" in train.peers) == (2, [4], False)
    assert (evaluated.rank, evaluated.world_size, [peer.rows for peer in evaluated.peers["eval"]]) == (0, 1, [4])
