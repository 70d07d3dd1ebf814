"""A policy whose actions are tokens of a causal language model, in the Hugging Face format.

The file needs only torch, transformers, and ``actor_critic.py`` of its folder: ``save_pretrained``
copies both next to the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from .actor_critic import uniforms


class TokenActorConfig(PretrainedConfig):
    """The last tokens of the vocabulary are those of actions, and those before them those of
    observations, as in OpenVLA (arXiv 2406.09246).

    language_model: the config of a causal language model. prompt_ids: tokens before each
    observation, such as an instruction. observation_bins: of each number of ``states``, evenly from
    minus to plus ``observation_limits`` [O]; numbers beyond them are in the outer bins.
    action_size: discrete actions, each a token; or the numbers of a continuous action, each a token
    of ``action_bins`` evenly from minus to plus ``action_limits`` [A]. value_columns: 1, or
    ``chunk`` for a value of each action.
    """

    model_type = "rollout_token_actor"

    language_model: dict[str, Any] | None = None
    prompt_ids: list[int] | None = None
    observation_size: int = 4
    observation_bins: int = 64
    observation_limits: list[float] | None = None
    action_size: int = 2
    action_bins: int = 256
    action_limits: list[float] | None = None
    continuous: bool = False
    chunk: int = 1
    value_columns: int = 1

    @property
    def action_tokens(self) -> int:
        """Tokens that a token of an action is chosen from."""
        return self.action_bins if self.continuous else self.action_size

    @property
    def tokens_of_action(self) -> int:
        """Tokens of one action, T."""
        return self.action_size if self.continuous else 1

    def of_model(self) -> PretrainedConfig:
        """The config of the language model. Raises ``ValueError`` if its vocabulary is small."""
        given = dict(self.language_model or {})
        config = AutoConfig.for_model(given.pop("model_type"), **given)
        if config.vocab_size < self.observation_bins + self.action_tokens:
            raise ValueError(
                f"the language model has {config.vocab_size} tokens, and {self.observation_bins + self.action_tokens} stand for "
                "observations and actions: take fewer bins"
            )
        return config


class TokenActor(PreTrainedModel):
    """A causal language model that reads an observation as tokens and continues with those of a
    chunk of actions, each from the probabilities of the tokens of actions alone; and a linear value
    head over its last hidden states."""

    config_class = TokenActorConfig
    config: TokenActorConfig
    base_model_prefix = "token_actor"

    def __init__(self, config: TokenActorConfig) -> None:
        super().__init__(config)
        of_model = config.of_model()
        self.language_model = AutoModelForCausalLM.from_config(of_model)
        self.value_head = nn.Linear(of_model.hidden_size, config.value_columns)
        self._first_action = of_model.vocab_size - config.action_tokens
        self._first_observation = self._first_action - config.observation_bins
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.value_head:
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)

    def forward(self, tokens: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logprobs and entropies of the tokens of a chunk's actions, and values.

        tokens: int64 [B, P], of prompt and observation. actions: int64 [B, C, T], from 0. Returns
        float32 [B, C, T], float32 [B, C, T], float32 [B, V].
        """
        before = tokens.shape[1] - 1
        chosen = actions.flatten(1)
        whole = torch.cat([tokens, chosen[:, :-1] + self._first_action], 1)
        out = self.language_model(input_ids=whole, output_hidden_states=True, use_cache=False)
        scores = self._of_actions(out.logits[:, before:]).log_softmax(-1)
        logprobs = scores.gather(-1, chosen[..., None])[..., 0].reshape(actions.shape)
        entropies = -(scores.exp() * scores).sum(-1).reshape(actions.shape)
        hidden = out.hidden_states[-1][:, before :: self.config.tokens_of_action]
        if self.config.value_columns == 1:
            return logprobs, entropies, self.value_head(hidden[:, 0]).float()
        values = self.value_head(hidden).float()  # column i is the value before action i
        return logprobs, entropies, values.diagonal(dim1=1, dim2=2)

    @torch.no_grad()
    def predict_action_batch(self, env_obs: Mapping[str, Any], mode: str, seeds: Tensor | None = None) -> tuple[Tensor, Any]:
        """Sample the tokens of a chunk for ``env_obs["states"]``, or take the most likely ones with
        the mode ``eval``. seeds: int64 [B]; the actions of a row then depend on its observation and
        seed alone. None: random numbers come from torch's generator."""
        tokens = self.tokens_of(env_obs["states"])
        count = self.config.chunk * self.config.tokens_of_action
        noise = None
        if mode != "eval":
            numbers = count * self.config.action_tokens
            drawn = torch.rand(len(tokens), numbers, dtype=torch.float64) if seeds is None else uniforms(seeds, numbers)
            noise = -(-drawn.log()).log().reshape(len(tokens), count, -1).to(self.device)  # Gumbel's
        chosen = self._continue(tokens, count, noise).unflatten(1, (self.config.chunk, -1))
        logprobs, _, values = self(tokens, chosen)
        inputs = {"tokens": tokens.cpu(), "actions": chosen.cpu()}
        prediction = {"prev_logprobs": logprobs.cpu(), "prev_values": values.cpu(), "forward_inputs": inputs}
        return self._played(chosen).cpu(), prediction

    def tokens_of(self, states: Tensor) -> Tensor:
        """The tokens of the prompt and of observations, int64 [B, P]. states: [B, O]."""
        limits = _limits(self.config.observation_limits, self.config.observation_size).to(self.device)
        bins = self.config.observation_bins
        found = ((states.to(self.device, torch.float32) / limits + 1) / 2 * bins).floor().clamp(0, bins - 1).long()
        prompt = torch.tensor(self.config.prompt_ids or [], dtype=torch.int64, device=self.device)
        return torch.cat([prompt.expand(len(found), -1), found + self._first_observation], 1)

    def _continue(self, tokens: Tensor, count: int, noise: Tensor | None) -> Tensor:
        """The next ``count`` tokens, int64 [B, count], from 0."""
        chosen: list[Tensor] = []
        following, cache = tokens, None
        for place in range(count):
            out = self.language_model(input_ids=following, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            scores = self._of_actions(out.logits[:, -1]).double()
            chosen.append((scores if noise is None else scores + noise[:, place]).argmax(-1))
            following = chosen[-1][:, None] + self._first_action
        return torch.stack(chosen, 1)

    def _of_actions(self, logits: Tensor) -> Tensor:
        return logits[..., self._first_action : self._first_action + self.config.action_tokens].float()

    def _played(self, chosen: Tensor) -> Tensor:
        """What is played: int64 [B, C], or the middle of each bin, float32 [B, C, A]."""
        if not self.config.continuous:
            return chosen[..., 0]
        limits = _limits(self.config.action_limits, self.config.action_size).to(chosen.device)
        return ((2 * chosen + 1) / self.config.action_bins - 1) * limits


def _limits(given: Sequence[float] | None, size: int) -> Tensor:
    return torch.tensor(list(given or [1.0] * size), dtype=torch.float32)


AutoConfig.register("rollout_token_actor", TokenActorConfig, exist_ok=True)
AutoModel.register(TokenActorConfig, TokenActor, exist_ok=True)
TokenActorConfig.register_for_auto_class()
TokenActor.register_for_auto_class("AutoModel")
