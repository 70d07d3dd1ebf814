"""The trainer of a policy that acts for many steps: PPO over chunks, or over actions."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout_workers.algorithms import build_algorithm
from rollout_workers.algorithms.advantage import whiten
from rollout_workers.algorithms.ppo import PpoConfig, gae
from rollout_workers.algorithms.types import Algorithm, LossTerms, TokenBatch, ValueBatch
from rollout_workers.devices import repeat_bits
from rollout_workers.multistep.policy import load_policy
from rollout_workers.trainer.distributed.ranks import ALONE
from rollout_workers.trainer.metrics import PhaseTimer, UpdateMeans, describe_batch
from rollout_workers.trainer.model.freezing import freeze
from rollout_workers.trainer.model.policy import Policy
from rollout_workers.trainer.objective import Models
from rollout_workers.trainer.optim.optimizer import FlatAdamW, OptimizerSet
from rollout_workers.trainer.trainer import Trainer, TrainerConfig, check_gradient
from rollout_workers.trainer.types import BadBatch, StepOutOfTurn, StepResult, TrainSample, check_rewards

NAMES = ("dones", "logprobs", "played", "rewards", "values")
"""Tensors of an episode besides its inputs."""
LEVELS = ("chunk_level", "action_level", "token_level")
"""By the dimensions of logprobs, from one on."""
_INPUTS = "inputs."


class ActingPolicy(Policy):
    """A policy whose ``forward`` returns logprobs, entropies, and values of chunks."""

    def __init__(self, model: Any) -> None:
        self.model, self.adapter, self._files = model.eval(), None, None


@dataclass(frozen=True, slots=True)
class Chunks:
    """N chunks of C actions, of all episodes one after the other.

    inputs: of ``forward``, each [N, ...]. played: bool [N, C]. logprobs: float32 [N], [N, C], or
    [N, C, T], at the time of sampling. values, advantages, returns: as ``logprobs``. counted: bool
    as ``logprobs``, what the loss counts. episode: int64 [N]. by_action: whether each action has a
    separate value.
    """

    inputs: Mapping[str, Tensor]
    played: Tensor
    logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    counted: Tensor
    episode: Tensor
    by_action: bool

    @property
    def positions(self) -> int:
        """Positions of a row: those of the sequence, if the inputs are tokens."""
        return max(self.counted[0].numel(), sum(t[0].numel() for t in self.inputs.values() if t.dtype == torch.int64))


def chunks_of(samples: Sequence[TrainSample], config: PpoConfig, reward_type: str, logprob_type: str = "") -> Chunks:
    """The chunks of a batch with their advantages. Raises :class:`BadBatch`.

    ``chunk_level``: the reward of a chunk is the sum of its rewards, its logprob the sum of those
    of the actions that were played, and ``gamma`` discounts from chunk to chunk. ``action_level``:
    each action that was played has its own. A reward of an action that was not played, which is the
    bootstrapped value, counts for the last one that was.

    logprob_type: what has a separate ratio of probabilities, ``chunk_level``, ``action_level``,
    or ``token_level``, by default as ``reward_type``. It has the advantage and the value of its
    action or chunk.
    """
    check_rewards(samples)
    for sample in samples:
        _check(sample)
    joined = {name: torch.cat([sample.tensors[name] for sample in samples]) for name in sorted(samples[0].tensors)}
    played, rewards, values = joined["played"], joined["rewards"].double(), joined["values"].float()
    lengths = torch.tensor([len(sample.tensors["played"]) for sample in samples])
    episode = torch.repeat_interleave(torch.arange(len(samples)), lengths)
    logprobs = at_level(joined["logprobs"].float(), played, logprob_type or reward_type)
    if reward_type == "action_level":
        if values.shape != played.shape:
            raise BadBatch(
                f"the policy has {values.shape[1]} values of a chunk of {played.shape[1]} actions; "
                '`multistep.reward_type = "action_level"` needs one of each'
            )
        last = played.sum(-1) - 1
        unplayed = (rewards * ~played).sum(-1)
        rewards = (rewards * played).index_put((torch.arange(len(last)), last), unplayed, accumulate=True)
        counted = played
        steps = episode[:, None].expand_as(played)[played]
        found = gae(rewards[played], values.double()[played], steps, gamma=config.gamma, gae_lambda=config.gae_lambda)
        advantages = torch.zeros(played.shape, dtype=torch.float64)
        advantages[played] = found
    else:
        values = values[:, 0]
        counted = played.any(-1)
        advantages = gae(rewards.sum(-1), values.double(), episode, gamma=config.gamma, gae_lambda=config.gae_lambda)
    returns = advantages + values.double()
    if config.whiten_advantages:
        advantages = advantages.clone()
        advantages[counted] = whiten(advantages[counted])
    inputs = {name.removeprefix(_INPUTS): tensor for name, tensor in joined.items() if name.startswith(_INPUTS)}
    values, advantages, returns = (spread(tensor, logprobs) for tensor in (values, advantages.float(), returns.float()))
    counted = spread(played if logprobs.dim() > 1 else counted, logprobs)
    return Chunks(inputs, played, logprobs, values, advantages, returns, counted, episode, reward_type == "action_level")


def at_level(tensor: Tensor, played: Tensor, level: str) -> Tensor:
    """Sums over the tokens of actions, and over the actions that were played of chunks. tensor:
    [N, C], or [N, C, T] with several tokens of an action. Returns [N], [N, C], or [N, C, T]."""
    if level == "token_level":
        return tensor if tensor.dim() == 3 else tensor[..., None]
    of_actions = tensor.sum(-1) if tensor.dim() == 3 else tensor
    return of_actions if level == "action_level" else (of_actions * played).sum(-1)


def spread(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor with further dimensions, as many as ``like`` has, along which it is repeated."""
    return tensor.reshape(*tensor.shape, *[1] * (like.dim() - tensor.dim())).expand_as(like)


def _check(sample: TrainSample) -> None:
    missing = [name for name in NAMES if name not in sample.tensors]
    if missing:
        raise BadBatch(f"sample {sample.sample} of group {sample.group_key} has no tensor `{missing[0]}`")
    played = sample.tensors["played"]
    sizes = {len(tensor) for tensor in sample.tensors.values()}
    same = all(sample.tensors[name].shape == played.shape for name in ("dones", "rewards"))
    same = same and sample.tensors["logprobs"].shape[:2] == played.shape
    if sizes != {len(played)} or not same or not len(played) or not bool(played[:, 0].all()):
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in sorted(sample.tensors.items()))
        raise BadBatch(f"the tensors of sample {sample.sample} of group {sample.group_key} don't fit each other: {shapes}")


def loss_of(model: Any, chunks: Chunks, rows: Tensor, algorithm: Algorithm, *, normalizer: float) -> LossTerms:
    """The losses of PPO (``surrogate.policy_loss`` and ``ppo.value_loss``) of the chunks ``rows``
    (int64 [R]), of their actions, or of the tokens of these, which are the tokens of the algorithm.
    normalizer: those that count in all parts of the update."""
    device = model.device
    inputs = {name: tensor[rows].to(device) for name, tensor in chunks.inputs.items()}
    logprobs, entropies, values = (tensor.float() for tensor in model(**inputs))
    played = chunks.played[rows].to(device)
    level = LEVELS[chunks.logprobs.dim() - 1]
    logprobs, entropies = at_level(logprobs, played, level), at_level(entropies, played, level)
    values = spread(values if chunks.by_action else values[:, 0], logprobs)
    counted = chunks.counted[rows].to(device)
    sampled, advantages, returns, before = (
        tensor[rows].to(device)[counted] for tensor in (chunks.logprobs, chunks.advantages, chunks.returns, chunks.values)
    )
    episode = chunks.episode[rows].to(device)
    tokens = TokenBatch(
        logprobs=logprobs[counted],
        normalizer=normalizer,
        sample=spread(episode, counted)[counted],
        advantages=advantages,
        engine_logprobs=sampled,
        entropy=entropies[counted],
    )
    assert algorithm.value_loss is not None
    policy = algorithm.loss(tokens)
    value = algorithm.value_loss(ValueBatch(values[counted], before, returns, normalizer))
    with torch.no_grad():
        difference = tokens.logprobs - sampled
        own = {"entropy": entropies[counted].sum(), "kl/update": (difference.exp() - 1 - difference).sum()}
    return LossTerms(policy.loss + value.loss, {**policy.sums, **value.sums, **own})


def of_actions(settings: PpoConfig) -> PpoConfig:
    """Settings with which the ratio is that to the probability at the time of sampling."""
    return replace(settings, off_policy=True, old_policy="engine")


class PolicyTrainer(Trainer):
    """A :class:`Trainer` of a policy that acts for many steps, on one rank."""

    def __init__(self, model_dir: str | os.PathLike[str], config: TrainerConfig) -> None:
        """Load the policy, at step 0. Raises the errors of ``load_policy``."""
        assert config.acting is not None and isinstance(config.settings, PpoConfig)
        self.ranks, self.model_dir, self.config, self.step = ALONE, Path(model_dir), config, 0
        self._ppo, self._acting = of_actions(config.settings), config.acting
        self.algorithm = build_algorithm(config.algorithm, self._ppo)
        self._use_threads()
        if config.deterministic:
            repeat_bits()
        torch.manual_seed(config.seed)
        device = ALONE.loading_device
        model: Any = load_policy(str(model_dir), device=str(device), trust_remote_code=config.acting.trust_remote_code)
        model.to(config.dtype)
        freeze(model, config.freeze)
        self.policy = ActingPolicy(model)
        self.models = Models(self.policy, self.algorithm, temperature=1.0, tokens=config.tokens_per_microbatch, seed=config.seed)
        self.optimizer, self.critic_optimizer = FlatAdamW(model, config.optimizer), None
        self.optimizers = OptimizerSet(self.optimizer, None)
        self.config_folder = self.model_dir
        self._restore_point, self._saving = None, None
        self.mark()

    def evaluate(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Raise ``BadBatch``: episodes of tensors are not held out."""
        raise BadBatch("a policy that acts for many steps has no held-out rows")

    def _make_step(self, samples: Sequence[TrainSample], step: int, on_progress: Callable[[int, int], None] | None) -> StepResult:
        if step != self.step + 1:
            raise StepOutOfTurn(f"step {step} was requested, but the learner is at step {self.step}")
        if not samples:
            raise BadBatch("the batch has no samples")
        started = time.perf_counter()
        self._use_threads()
        ordered = sorted(samples, key=lambda sample: (sample.group_key, sample.sample))
        chunks = chunks_of(ordered, self._ppo, self._acting.reward_type, self._acting.logprob_type)
        metrics = describe_batch(ordered, step=step, sampled=True) | _lengths(ordered)
        metrics["time/pack"] = time.perf_counter() - started
        before = self.optimizers.snapshot()
        rate = self.config.schedule.rate(step)
        timer, updates = PhaseTimer(), UpdateMeans()
        sums: dict[str, float] = {}
        count = 0
        try:
            for rows in self._minibatches(len(chunks.episode), step):
                weight = int(chunks.counted[rows].sum())
                loss, parts = 0.0, list(rows.split(max(1, self.config.tokens_per_microbatch // chunks.positions)))
                for number, part in enumerate(parts):
                    loss += self._accumulate_part(chunks, part, weight, sums, timer)
                    if on_progress is not None:
                        on_progress(number + 1, len(parts))
                norms = self.optimizers.norms()
                check_gradient(loss, norms, rate, self.config.refuse_grad_norm)
                with timer.measure("optimizer"):
                    self.optimizers.step((rate, rate), norms)
                updates.add(loss, norms, len(rows))
                count += weight
        except BaseException:
            self.optimizers.clear()
            self.optimizers.restore(before)
            raise
        self.step = step
        seconds = time.perf_counter() - started
        metrics |= {name: total / count for name, total in sums.items()} | timer.seconds() | updates.metrics()
        metrics |= {
            "learning_rate": rate,
            "tokens/trained": float(chunks.played.sum()),
            "tokens_per_second": metrics["tokens"] / seconds,
            "samples_per_second": metrics["samples"] / seconds,
            "time/step": seconds,
        }
        return StepResult(step=step, metrics=metrics, advantages=_means(ordered, chunks))

    def _accumulate_part(self, chunks: Chunks, rows: Tensor, weight: int, sums: dict[str, float], timer: PhaseTimer) -> float:
        model = self.policy.model
        with timer.measure("forward"):
            part = loss_of(model, chunks, rows, self.algorithm, normalizer=weight)
        for name, value in part.sums.items():
            sums[name] = sums.get(name, 0.0) + float(value)
        with timer.measure("backward"):
            self.optimizers.add(torch.autograd.grad(part.loss, self.optimizers.parameters, allow_unused=True))
        return float(part.loss.detach())

    def _minibatches(self, chunks: int, step: int) -> Iterator[Tensor]:
        """The rows of each update. Their order depends on the seed of the run and the step."""
        mixed = hashlib.blake2b(f"multistep {self.config.seed} {step}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(mixed, "little") >> 1)
        for _ in range(self._ppo.epochs):
            yield from torch.randperm(chunks, generator=generator).chunk(self._ppo.minibatches)


def _lengths(samples: Sequence[TrainSample]) -> dict[str, float]:
    """Steps instead of tokens."""
    lengths = [int(sample.tensors["played"].sum()) for sample in samples]
    return {
        "tokens": float(sum(lengths)),
        "length/mean": sum(lengths) / len(lengths),
        "length/min": float(min(lengths)),
        "length/max": float(max(lengths)),
    }


def _means(samples: Sequence[TrainSample], chunks: Chunks) -> dict[tuple[str, int], float]:
    """The mean advantage of each sample."""
    found: dict[tuple[str, int], float] = {}
    for number, sample in enumerate(samples):
        own = chunks.episode == number
        mean = float(chunks.advantages[own][chunks.counted[own]].double().mean())
        found[sample.group_key, sample.sample] = mean if math.isfinite(mean) else 0.0
    return found
