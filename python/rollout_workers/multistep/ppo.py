"""PPO over chunks of actions, with the rollouts of a :class:`MultiStepRolloutWorker`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollout_workers.algorithms.ppo import PpoConfig, value_loss
from rollout_workers.algorithms.surrogate import policy_loss
from rollout_workers.algorithms.types import TokenBatch, ValueBatch
from rollout_workers.multistep.actor_critic import ActorCritic
from rollout_workers.multistep.channel import Channel
from rollout_workers.multistep.errors import BatchInvalid
from rollout_workers.multistep.policy import Prediction
from rollout_workers.multistep.worker import MultiStepRolloutWorker


@dataclass(frozen=True, slots=True)
class Rollout:
    """T chunks of B rows, C actions a chunk.

    states: float32 [T, B, O]. actions: [T, B, C, ...]. logprobs: float32 [T, B], of whole chunks.
    values: float32 [T + 1, B], the last of the observation that follows. rewards: float32 [T, B],
    sums of chunks, bootstrapped. dones: bool [T, B], whether an episode ended in the chunk.
    version: of the weights that all actions were sampled with.
    """

    states: Tensor
    actions: Tensor
    logprobs: Tensor
    values: Tensor
    rewards: Tensor
    dones: Tensor
    version: int


class Collector:
    """Collects rollouts that follow each other without a gap."""

    def __init__(self, worker: MultiStepRolloutWorker, observations: Channel, actions: Channel) -> None:
        self._worker, self._observations, self._actions = worker, observations, actions
        self._batch: dict[str, object] | None = None

    async def collect(self, chunks: int) -> Rollout:
        """The next ``chunks`` chunks of all rows. Raises :class:`BatchInvalid` if the policy
        returns no logprobs, values, or inputs."""
        worker, version = self._worker, self._worker.version
        batch = self._batch or await worker.recv_env_output(self._observations)
        inputs: list[dict[str, Tensor]] = []
        logprobs, values, rewards, dones = [], [], [], []
        for _ in range(chunks):
            chosen, prediction = worker.predict(batch["obs"])  # type: ignore[arg-type]
            worker.send_chunk_actions(self._actions, chosen)
            inputs.append(_given(prediction, "forward_inputs"))
            logprobs.append(_given(prediction, "prev_logprobs").sum(-1))
            values.append(_given(prediction, "prev_values")[:, 0])
            batch = self._batch = await worker.recv_env_output(self._observations)
            done, reward = worker.get_dones_and_rewards(batch)
            assert reward is not None  # only the first batch has none
            rewards.append(reward.sum(-1))
            dones.append(done.any(-1))
        values.append(_given(worker.predict(batch["obs"])[1], "prev_values")[:, 0])  # type: ignore[arg-type]
        return Rollout(
            states=torch.stack([one["states"] for one in inputs]),
            actions=torch.stack([one["actions"] for one in inputs]),
            logprobs=torch.stack(logprobs),
            values=torch.stack(values),
            rewards=torch.stack(rewards),
            dones=torch.stack(dones),
            version=version,
        )


def _given(prediction: Prediction, key: str) -> Any:
    if prediction.get(key) is None:
        raise BatchInvalid(f"the policy returned no `{key}`", fix="docs/multistep.md lists what a policy returns")
    return prediction[key]


def chunk_gae(rewards: Tensor, values: Tensor, dones: Tensor, *, gamma: float, gae_lambda: float) -> Tensor:
    """Generalized advantage estimation (Schulman et al., arXiv 1506.02438, equation 16) over
    chunks; ``gamma`` discounts from chunk to chunk. Nothing passes the end of an episode.

    rewards: float32 [T, B]. values: float32 [T + 1, B]. dones: bool [T, B]. Returns float32 [T, B].
    """
    out, running = torch.empty_like(rewards), torch.zeros_like(rewards[0])
    for place in range(len(rewards) - 1, -1, -1):
        continues = (~dones[place]).to(rewards.dtype)
        delta = rewards[place] + gamma * continues * values[place + 1] - values[place]
        out[place] = running = delta + gamma * gae_lambda * continues * running
    return out


@dataclass(frozen=True, slots=True)
class ChunkPpo:
    """Settings of an update (Schulman et al., arXiv 1707.06347)."""

    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    epochs: int = 4
    minibatches: int = 4
    entropy_coefficient: float = 0.01
    value_coefficient: float = 0.5
    max_gradient_norm: float = 0.5


def update(policy: ActorCritic, optimizer: torch.optim.Optimizer, rollout: Rollout, config: ChunkPpo) -> dict[str, float]:
    """Train on a rollout. The order of rows comes from torch's generator. Returns means over the
    update."""
    advantages = chunk_gae(rollout.rewards, rollout.values, rollout.dones, gamma=config.gamma, gae_lambda=config.gae_lambda)
    values = rollout.values[:-1]
    data = (rollout.states, rollout.actions, rollout.logprobs, values, advantages, advantages + values)
    flat = [tensor.flatten(0, 1) for tensor in data]
    settings = PpoConfig(
        clip_low=config.clip,
        clip_high=config.clip,
        entropy_coefficient=config.entropy_coefficient,
        value_coefficient=config.value_coefficient,
        value_clip=0.0,
        off_policy=True,
        old_policy="engine",
    )
    sums = {"loss/policy": 0.0, "loss/value": 0.0, "entropy": 0.0, "clip_fraction": 0.0}
    for _ in range(config.epochs):
        for rows in torch.randperm(len(flat[0])).chunk(config.minibatches):
            states, actions, old, before, advantage, target = (tensor[rows] for tensor in flat)
            logprobs, entropies, values = policy(states, actions)
            advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
            size, entropy = float(len(rows)), entropies.sum(-1)
            tokens = TokenBatch(logprobs.sum(-1), size, advantages=advantage, engine_logprobs=old, entropy=entropy)
            chosen = policy_loss(tokens, config=settings)
            valued = value_loss(ValueBatch(values[:, 0], before, target, size), config=settings)
            optimizer.zero_grad()
            (chosen.loss + valued.loss).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_gradient_norm)
            optimizer.step()
            bonus = entropy.detach().mean()
            sums["loss/policy"] += float(chosen.loss.detach() + config.entropy_coefficient * bonus)
            sums["loss/value"] += float(valued.sums["value/loss"]) / size
            sums["entropy"] += float(bonus)
            sums["clip_fraction"] += float(chosen.sums["clip_fraction"]) / size
    return {name: value / (config.epochs * config.minibatches) for name, value in sums.items()}
