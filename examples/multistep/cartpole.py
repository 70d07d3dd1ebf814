"""Train a policy with chunks of actions on gymnasium's CartPole, in one process:

    python examples/multistep/cartpole.py --chunk 4 --seed 0

Needs `pip install gymnasium`. Ends when the mean return of the last 50 episodes is above 400.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

import gymnasium
import torch

from rollout_workers.multistep import ActorWeights, MemoryChannel, MemoryWeights, MultiStepRolloutWorker, mapped_ranks
from rollout_workers.multistep.actor_critic import ActorCritic, ActorCriticConfig
from rollout_workers.multistep.environment import EnvironmentRank
from rollout_workers.multistep.ppo import ChunkPpo, Collector, update

ENVIRONMENTS, RANKS, STEPS = 8, 2, 128
GOAL, EPISODES = 400.0, 50


async def main(chunk: int, seed: int, limit_seconds: float) -> float:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    config = {
        "rollout": {"rank": 0, "world_size": 1},
        "env": {"world_size": RANKS, "train": {"total_num_envs": ENVIRONMENTS, "auto_reset": True}},
        "actor": {"model": {"num_action_chunks": chunk}},
        "algorithm": {"gamma": 0.99},
    }
    shape = ActorCriticConfig(observation_size=4, action_size=2, chunk=chunk)
    actor, policy = ActorCritic(shape), ActorCritic(shape)
    optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3, eps=1e-5)
    observations, actions, weights = MemoryChannel(), MemoryChannel(), MemoryWeights()
    worker = MultiStepRolloutWorker(config)
    worker.init_worker(policy.eval(), weights)
    ranks = [
        EnvironmentRank(
            [gymnasium.make("CartPole-v1") for _ in range(ENVIRONMENTS // RANKS)],
            mapped_ranks(ENVIRONMENTS, world_size=RANKS, peers=1, rank=rank),
            rank=rank,
            seed=1000 * seed + 100 * rank,
        )
        for rank in range(RANKS)
    ]
    playing = [asyncio.create_task(rank.play(observations, actions, chunk)) for rank in ranks]
    collector, started, mean, version = Collector(worker, observations, actions), time.monotonic(), 0.0, 0
    while mean < GOAL and time.monotonic() - started < limit_seconds:
        version += 1
        weights.publish(ActorWeights(version, actor.state_dict()))
        await worker.sync_model_from_actor()
        update(actor, optimizer, await collector.collect(STEPS // chunk), ChunkPpo())
        returns = [value for rank in ranks for value in rank.returns[-EPISODES // RANKS :]]
        mean = sum(returns) / len(returns) if len(returns) >= EPISODES else 0.0
        if version % 20 == 0:
            print(f"version {version}: mean return {mean:.0f} after {time.monotonic() - started:.0f} s", flush=True)
    for task in playing:
        task.cancel()
    print(f"chunk {chunk}, seed {seed}: mean return {mean:.0f} after {version} updates and {time.monotonic() - started:.0f} s")
    return mean


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--chunk", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-seconds", type=float, default=300)
    given = parser.parse_args()
    sys.exit(asyncio.run(main(given.chunk, given.seed, given.limit_seconds)) < GOAL)
