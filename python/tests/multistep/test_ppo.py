from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from rollout_workers.algorithms.ppo import gae
from rollout_workers.multistep import (
    ActorWeights,
    BatchInvalid,
    MemoryChannel,
    MemoryWeights,
    MultiStepRolloutWorker,
    mapped_ranks,
)
from rollout_workers.multistep.environment import EnvironmentRank
from rollout_workers.multistep.ppo import ChunkPpo, Collector, chunk_gae, update

from .worlds import actor_critic, config


class Counting:
    """An episode of ``length`` steps, each with the reward ``action + 1``; the observation counts
    all steps. It terminates, or is truncated."""

    def __init__(self, length: int, *, truncates: bool = False) -> None:
        self.length, self.truncates, self.steps, self.seeds = length, truncates, 0, []

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        self.left = self.length
        self.seeds.append(seed)
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.left -= 1
        self.steps += 1
        over = self.left == 0
        return self._observation(), action + 1, over and not self.truncates, over and self.truncates, {}

    def _observation(self) -> Any:
        return np.full(4, self.steps, dtype=np.float64)


def test_an_episode_that_ends_within_a_chunk_skips_the_other_actions() -> None:
    environments = [Counting(2), Counting(5), Counting(3, truncates=True)]
    rank = EnvironmentRank(environments, mapped_ranks(3, world_size=1, peers=1, rank=0), seed=7)
    first = rank.first(3)
    assert first["rewards"] is None and not first["dones"].any()
    batch = rank.step(torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 0]]))
    assert batch["rewards"].tolist() == [[1, 2, 0], [2, 2, 2], [1, 1, 1]]
    assert batch["dones"].tolist() == [[False, False, True], [False] * 3, [False, False, True]]
    assert batch["terminations"][:, -1].tolist() == [True, False, False]
    assert batch["truncations"][:, -1].tolist() == [False, False, True]
    assert batch["final_obs"]["states"][:, 0].tolist() == [2, 3, 3]
    assert batch["obs"]["states"].dtype == torch.float32
    assert rank.returns == [3.0, 3.0]
    assert [environment.seeds for environment in environments] == [[7, None], [8], [9, None]]
    following = rank.step(torch.zeros(3, 1, dtype=torch.int64))
    assert following["final_obs"] is None and environments[0].left == 1


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="have 3 rows, not 2"):
        EnvironmentRank([Counting(2), Counting(2)], mapped_ranks(3, world_size=1, peers=1, rank=0))
    rank = EnvironmentRank([Counting(2)], mapped_ranks(1, world_size=1, peers=1, rank=0), rank=5)
    for actions in (torch.zeros(1), torch.zeros(2, 1), torch.zeros(1, 0)):
        with pytest.raises(BatchInvalid, match=r"actions of env rank 5 have the shape .*, not \[1, C, \.\.\.\]"):
            rank.step(actions)


def test_advantages_are_those_of_episodes_one_after_the_other() -> None:
    generator = torch.Generator().manual_seed(5)
    rewards, values = (torch.randn(rows, 2, generator=generator, dtype=torch.float64) for rows in (9, 10))
    dones = torch.zeros(9, 2, dtype=torch.bool)
    dones[3, 0] = dones[8] = dones[0, 1] = True
    found = chunk_gae(rewards, values, dones, gamma=0.9, gae_lambda=0.8)
    for row, samples in enumerate(([0] * 4 + [1] * 5, [0] + [1] * 8)):
        wanted = gae(rewards[:, row], values[:-1, row], torch.tensor(samples), gamma=0.9, gae_lambda=0.8)
        torch.testing.assert_close(found[:, row], wanted)
    open_end = chunk_gae(rewards[:1], values[:2], torch.zeros(1, 2, dtype=torch.bool), gamma=0.9, gae_lambda=0.8)
    torch.testing.assert_close(open_end[0], rewards[0] + 0.9 * values[1] - values[0])


class Mesh:
    """Two rollout ranks and three environment ranks in one event loop, each on its own rows."""

    def __init__(self, policy: Any, make: Any, rows: int = 6) -> None:
        self.observations, self.actions = MemoryChannel(), MemoryChannel()
        self.workers, self.sources = [], []
        for rank in range(2):
            changes = {"rollout__rank": rank, "rollout__world_size": 2, "env__world_size": 3, "env__eval": None}
            worker = MultiStepRolloutWorker(config(**changes, env__train__total_num_envs=rows))
            self.sources.append(MemoryWeights())
            worker.init_worker(policy, self.sources[-1])
            self.workers.append(worker)
        self.ranks = [
            EnvironmentRank(
                [make() for _ in range(rows // 3)],
                mapped_ranks(rows, world_size=3, peers=2, rank=rank),
                rank=rank,
                seed=10 * rank,
            )
            for rank in range(3)
        ]


async def test_rollouts_follow_each_other_over_many_to_many_ranks() -> None:
    mesh = Mesh(actor_critic(), lambda: Counting(4))
    tasks = [asyncio.create_task(rank.play(mesh.observations, mesh.actions, 2)) for rank in mesh.ranks]
    collectors = [Collector(worker, mesh.observations, mesh.actions) for worker in mesh.workers]
    for source in mesh.sources:
        source.publish(ActorWeights(4, actor_critic().state_dict()))
    await asyncio.gather(*(worker.sync_model_from_actor() for worker in mesh.workers))
    firsts = await asyncio.gather(*(collector.collect(3) for collector in collectors))
    seconds = await asyncio.gather(*(collector.collect(2) for collector in collectors))
    for first, second in zip(firsts, seconds, strict=True):
        assert first.states[:, :, 0].tolist() == [[0.0] * 3, [2.0] * 3, [4.0] * 3]
        assert second.states[:, :, 0].tolist() == [[6.0] * 3, [8.0] * 3]
        assert first.dones.tolist() == [[False] * 3, [True] * 3, [False] * 3]
        assert torch.equal(first.rewards, (first.actions + 1).sum(-1).float())
        assert first.values.shape == (4, 3) and first.version == 4
    for task in tasks:
        task.cancel()


class Sign:
    """The right action is 1 where the observation is positive. Episodes of 4 steps, then cut."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.numbers = np.random.default_rng(seed)
        self.left = 4
        return self._draw(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        reward, self.left = float(action == (self.now[0] > 0)), self.left - 1
        return self._draw(), reward, False, self.left == 0, {}

    def _draw(self) -> Any:
        self.now = self.numbers.choice([-1.0, 1.0], 4)
        return self.now


async def test_a_policy_learns() -> None:
    """The first action of a chunk can be right each time, the second one half of the time."""
    policy = actor_critic(seed=1, value_columns=1)
    mesh = Mesh(policy, Sign)
    tasks = [asyncio.create_task(rank.play(mesh.observations, mesh.actions, 2)) for rank in mesh.ranks]
    collectors = [Collector(worker, mesh.observations, mesh.actions) for worker in mesh.workers]
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    torch.manual_seed(2)
    means: list[float] = []
    for _ in range(40):
        rollouts = await asyncio.gather(*(collector.collect(12) for collector in collectors))
        right = [(one.actions[:, :, 0] == (one.states[:, :, 0] > 0)).float().mean() for one in rollouts]
        means.append(float(sum(right)) / 2)
        for one in rollouts:
            found = update(policy, optimizer, one, ChunkPpo(minibatches=1))
    for task in tasks:
        task.cancel()
    assert sum(means[:2]) / 2 < 0.65
    assert sum(means[-5:]) / 5 > 0.9
    assert set(found) == {"loss/policy", "loss/value", "entropy", "clip_fraction"}


async def test_a_policy_that_returns_no_logprobs_is_refused() -> None:
    class Silent:
        def predict_action_batch(self, env_obs: Any, mode: str) -> tuple[Any, Any]:
            return torch.zeros(3, 2), {"forward_inputs": {}}

    mesh = Mesh(Silent(), lambda: Counting(4))
    tasks = [asyncio.create_task(rank.play(mesh.observations, mesh.actions, 2)) for rank in mesh.ranks]
    with pytest.raises(BatchInvalid, match="the policy returned no `prev_logprobs`"):
        await Collector(mesh.workers[0], mesh.observations, mesh.actions).collect(1)
    for task in tasks:
        task.cancel()
