"""A small policy with a value head, in the Hugging Face format.

The file needs only torch and transformers: ``save_pretrained`` copies it next to the weights, so
that ``AutoModel.from_pretrained(folder, trust_remote_code=True)`` works without this package.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel

LOG_STD = -0.5
"""Logarithm of the standard deviation of continuous actions before training."""


class ActorCriticConfig(PretrainedConfig):
    """observation_size: numbers of ``states`` per row. action_size: discrete actions, or the
    numbers of a continuous action. value_columns: 1, or ``chunk`` for a value of each action."""

    model_type = "rollout_actor_critic"

    observation_size: int = 4
    action_size: int = 2
    continuous: bool = False
    chunk: int = 1
    value_columns: int = 1
    hidden_size: int = 64
    layers: int = 2


class ActorCritic(PreTrainedModel):
    """Two multi-layer perceptrons over ``states``: one for the actions, one for the values.

    An action of a chunk does not depend on the sampled actions before it.
    """

    config_class = ActorCriticConfig
    config: ActorCriticConfig
    base_model_prefix = "actor_critic"

    def __init__(self, config: ActorCriticConfig) -> None:
        super().__init__(config)
        self.actor = _perceptron(config, config.chunk * config.action_size)
        self.value_head = _perceptron(config, config.value_columns)
        if config.continuous:
            self.log_std = nn.Parameter(torch.full((config.chunk, config.action_size), LOG_STD))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Linear):
            return
        last = module in (self.actor[-1], self.value_head[-1])
        gain = (0.01 if module is self.actor[-1] else 1.0) if last else math.sqrt(2)
        nn.init.orthogonal_(module.weight, gain)
        nn.init.zeros_(module.bias)

    def forward(self, states: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logprobs and entropies of a chunk's actions, and values.

        states: float32 [B, O]. actions: int64 [B, C], or float32 [B, C, A] if continuous. Returns
        float32 [B, C], float32 [B, C], float32 [B, V].
        """
        distribution = self.distribution(states)
        logprobs, entropies = distribution.log_prob(actions), distribution.entropy()
        if self.config.continuous:
            logprobs, entropies = logprobs.sum(-1), entropies.sum(-1)
        return logprobs, entropies, self.value_head(states)

    def distribution(self, states: Tensor) -> torch.distributions.Distribution:
        """Of the actions of each chunk."""
        outputs = self.actor(states).unflatten(-1, (self.config.chunk, self.config.action_size))
        if self.config.continuous:
            return torch.distributions.Normal(outputs, self.log_std.exp().expand_as(outputs), validate_args=False)
        return torch.distributions.Categorical(logits=outputs, validate_args=False)

    @torch.no_grad()
    def predict_action_batch(self, env_obs: Mapping[str, Any], mode: str, seeds: Tensor | None = None) -> tuple[Tensor, Any]:
        """Sample the actions of ``env_obs["states"]``, or take the most likely ones with the mode
        ``eval``. seeds: int64 [B]; the actions of a row then depend on its observation and seed
        alone. None: random numbers come from torch's generator."""
        states = env_obs["states"].to(self.device, self.dtype)
        distribution = self.distribution(states)
        if mode == "eval":
            actions = distribution.mode
        else:
            actions = distribution.sample() if seeds is None else _seeded(distribution, seeds)
        logprobs, _, values = self(states, actions)
        inputs = {"states": states.cpu(), "actions": actions.cpu()}
        return actions, {"prev_logprobs": logprobs.cpu(), "prev_values": values.cpu(), "forward_inputs": inputs}


def _seeded(distribution: torch.distributions.Distribution, seeds: Tensor) -> Tensor:
    """A sample of each row from the random numbers of its seed: Gumbel's for discrete actions,
    those of Box and Muller for continuous ones."""
    if isinstance(distribution, torch.distributions.Categorical):
        logits: Any = distribution.logits
        noise = uniforms(seeds, logits[0].numel()).reshape(logits.shape).to(logits.device)
        return (logits.double() - (-noise.log()).log()).argmax(-1)
    means: Any = distribution.mean
    first, second = uniforms(seeds, 2 * means[0].numel()).reshape(len(means), 2, -1).to(means.device).unbind(1)
    normal = (-2 * first.log()).sqrt() * (2 * math.pi * second).cos()
    scale: Any = distribution.stddev
    return means + scale * normal.reshape(means.shape).to(means.dtype)


def uniforms(seeds: Tensor, count: int) -> Tensor:
    """float64 [B, count] in (0, 1): number i of a row is the output i of SplitMix64 from its seed.
    seeds: int64 [B]."""
    seed = seeds.cpu().numpy().astype(np.uint64)
    step = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = seed[:, None] + step
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return torch.from_numpy(((mixed >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53)


def _perceptron(config: ActorCriticConfig, outputs: int) -> nn.Sequential:
    sizes = [config.observation_size, *[config.hidden_size] * config.layers]
    layers: list[nn.Module] = []
    for size, following in itertools.pairwise(sizes):
        layers += [nn.Linear(size, following), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


AutoConfig.register("rollout_actor_critic", ActorCriticConfig, exist_ok=True)
AutoModel.register(ActorCriticConfig, ActorCritic, exist_ok=True)
ActorCriticConfig.register_for_auto_class()
ActorCritic.register_for_auto_class("AutoModel")
