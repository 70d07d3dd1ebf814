"""Losses over tokens: SFT, PPO, the GRPO family, distillation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rollout_workers.algorithms import EstimatorBatch, TokenBatch, ValueBatch
from rollout_workers.algorithms.advantage import equal_groups
from rollout_workers.algorithms.divergence import k3
from rollout_workers.algorithms.importance import bounded_exp
from rollout_workers.rewards.process_reward import NOTHING
from rollout_workers.trainer.model.policy import Logprobs
from rollout_workers.trainer.objective.base import Models, Part
from rollout_workers.trainer.objective.token_index import TokenIndex
from rollout_workers.trainer.packing import MicroBatch
from rollout_workers.trainer.types import BadBatch, TrainSample, check_rewards


class Tokens:
    """One step over tokens.

    Old logprobs, values, and a KL in the reward must be known for the whole batch before the first
    update. They are computed in a forward pass without gradient, which is skipped if the algorithm
    needs none of them.
    """

    def __init__(self, models: Models, samples: Sequence[TrainSample], step: int) -> None:
        self._models, self._step = models, step
        self._algorithm, self._needs = models.algorithm, models.algorithm.needs
        self.metrics: dict[str, float] = {}
        rewards = self._rewards(samples)
        keys = {key: number for number, key in enumerate(dict.fromkeys(sample.group_key for sample in samples))}
        self._groups = torch.from_numpy(np.array([keys[sample.group_key] for sample in samples], np.int64))
        self._samples, self._number = samples, len(keys)
        self._index: TokenIndex | None = None
        self._known: dict[str, Tensor] = {}
        self._advantages: Tensor | None = None  # float32 [S] or [T]
        self._by_token = False
        self._whole: list[MicroBatch] | None = None
        self._count = float(len(samples))
        self._normalizer = _trained(samples)
        self._check_teacher(samples)
        if not self._normalizer:
            raise BadBatch(f"step {step}: no token of the {len(samples)} samples has a loss; check the loss masks")
        self.metrics["tokens/trained"] = self._normalizer
        if self._needs_forward_pass():
            self._forward_pass()
        self._estimate(rewards)
        left_out = self._left_out(rewards)
        self._kept = (~left_out).numpy()
        if bool(left_out.any()):
            self._samples = [_without_loss(s) if out else s for s, out in zip(samples, left_out.tolist(), strict=True)]
            self._whole = None
            self._normalizer = max(1.0, _trained(self._samples))
            self.metrics["tokens/trained"] = _trained(self._samples)

    def updates(self) -> Iterator[list[MicroBatch]]:
        """One update of the whole batch, or ``epochs`` times ``minibatches`` updates of whole
        groups, shuffled for each epoch."""
        updates, everything = self._algorithm.updates, range(len(self._samples))
        if updates.count == 1:
            yield self._begin(everything)
            return
        for epoch in range(updates.epochs):
            order = np.random.default_rng((self._models.seed, self._step, epoch)).permutation(self._number)
            rank = np.argsort(order)[self._groups.numpy()]
            drawn = np.argsort(rank, kind="stable")
            for part in np.array_split(drawn, min(updates.minibatches, len(drawn))):
                yield self._begin(sorted(part.tolist()))

    def part(self, batch: MicroBatch) -> Part:
        """Policy loss and, with a critic, value loss; the latter alone while the critic warms
        up."""
        models = self._models
        warming = 0 < self._step <= self._algorithm.critic_warmup_steps  # 0: an evaluation of the first model
        with torch.set_grad_enabled(torch.is_grad_enabled() and not warming):
            policy, top = self._logprobs(batch)
        slots = None if self._index is None else self._index.of(batch)
        terms = self._algorithm.loss(self._tokens(batch, policy, slots, top))
        loss, sums = torch.zeros_like(terms.loss) if warming else terms.loss, dict(terms.sums)
        if models.critic is not None and self._algorithm.value_loss is not None:
            assert slots is not None
            value = self._algorithm.value_loss(
                ValueBatch(
                    values=models.critic.values(batch, policy.hidden),
                    old_values=self._at("values", slots, policy.tokens),
                    returns=self._at("returns", slots, policy.tokens),
                    normalizer=self._normalizer,
                )
            )
            loss = loss + value.loss
            sums |= value.sums
        measured, maxima = self._measured(batch, policy, slots)
        return Part(loss, len(batch.target), sums | measured, maxima, terms.shares)

    def _logprobs(self, batch: MicroBatch) -> tuple[Logprobs, tuple[Tensor, Tensor] | None]:
        """The policy's forward pass, and logprobs of the teacher's most likely tokens if they are
        needed: the teacher's and the policy's, float32 [N, k] each."""
        models, k = self._models, self._needs.teacher_top
        hidden = models.critic is not None and models.critic.on_policy
        if not k:
            return models.policy.logprobs(batch, temperature=models.temperature, hidden=hidden), None
        assert models.teacher is not None
        ids, of_teacher = models.teacher.top(batch, k, temperature=models.temperature)
        size, rows = len(batch.target), torch.from_numpy(batch.predictor).to(ids.device)
        tokens = ids[rows].cpu().numpy()  # [N, k]
        both = dataclasses.replace(
            batch,
            predictor=np.concatenate((batch.predictor, batch.predictor.repeat(tokens.shape[1]))),
            target=np.concatenate((batch.target, tokens.reshape(-1).astype(batch.target.dtype))),
        )
        policy = models.policy.logprobs(both, temperature=models.temperature, hidden=hidden)
        top = of_teacher[rows], policy.tokens[size:].view(size, -1)
        return dataclasses.replace(policy, tokens=policy.tokens[:size]), top

    def advantages(self) -> Mapping[tuple[str, int], float]:
        """(group_key, sample) -> advantage; the mean over the trained tokens if each token has its
        own."""
        if self._advantages is None:
            return {}
        values = self._advantages.double()
        if self._by_token:
            assert self._index is not None
            count = torch.bincount(self._index.sample, minlength=len(self._samples)).clamp(min=1)
            values = torch.zeros(len(self._samples), dtype=torch.float64).index_add_(0, self._index.sample, values) / count
        return {(s.group_key, s.sample): value for s, value in zip(self._samples, values.tolist(), strict=True)}

    def _begin(self, chosen: Sequence[int]) -> list[MicroBatch]:
        """The micro-batches of an update over some samples; sets the normalizers.

        A sample without a nonzero advantage counts in the normalizers but is not computed, unless
        the loss has other terms.
        """
        part = [self._samples[index] for index in chosen]
        whole = len(part) == len(self._samples)
        if not whole or self._algorithm.updates.count > 1:
            self._normalizer = max(1.0, _trained(part))
        self._count = max(1.0, float(self._kept[list(chosen)].sum()))
        if whole and self._whole is not None and self._needs.every_token:
            return self._whole
        return self._models.pack(self._samples, self._with_gradient(chosen))

    def _with_gradient(self, chosen: Sequence[int]) -> Sequence[int]:
        if self._advantages is None or self._needs.every_token:
            return chosen
        active = (self._advantages != 0).numpy()
        if self._by_token:
            assert self._index is not None
            active = np.bincount(self._index.sample.numpy(), weights=active, minlength=len(self._samples)) > 0
        return [index for index in chosen if active[index]]

    def _check_teacher(self, samples: Sequence[TrainSample]) -> None:
        """Raise ``BadBatch`` if a sample lacks the teacher's logprobs. Called before any
        computation, so that all ranks fail."""
        if not self._needs.teacher or self._models.teacher is not None:
            return
        if self._needs.teacher_top:
            raise BadBatch("samples carry the teacher's logprobs of sampled tokens only; teacher_top_k needs the teacher's model")
        for sample in samples:
            if sample.teacher_logprobs is None and sample.loss_mask[1:].any():
                raise BadBatch(f"sample {sample.sample} of group {sample.group_key} has no logprobs of the teacher")

    def _rewards(self, samples: Sequence[TrainSample]) -> Tensor:
        """float64 [S]: the rewards after shaping. Raises ``BadBatch``."""
        rewards = torch.from_numpy(np.array([sample.reward for sample in samples], np.float64))
        if self._needs.sampled:
            check_rewards(samples)
        if self._algorithm.shape is None:
            return rewards
        return self._algorithm.shape(rewards, _lengths(samples), _truncated(samples))

    def _left_out(self, rewards: Tensor) -> Tensor:
        """bool [S]: the samples that the loss leaves out. Needs the advantages."""
        left_out = _truncated(self._samples) & self._algorithm.mask_truncated
        if self._algorithm.drop_equal_groups:
            equal = self._without_gradient() if _by_parts(self._samples) else equal_groups(rewards, self._groups)
            self.metrics["groups/equal_rewards"] = float(len(set(self._groups[equal].tolist())))
            left_out = left_out | equal
        return left_out

    def _without_gradient(self) -> Tensor:
        """bool [S]: the samples of groups without any advantage. With token rewards equal sums are
        not enough."""
        assert self._index is not None and self._advantages is not None
        tokens = (self._advantages != 0).float()
        active = torch.zeros(self._number).index_add_(0, self._groups[self._index.sample], tokens)
        return (active == 0)[self._groups]

    def _needs_forward_pass(self) -> bool:
        by_estimate = self._algorithm.advantages is None and self._algorithm.estimate is not None
        return (
            self._needs.old_logprobs
            or self._needs.critic
            or (self._needs.reference and (by_estimate or self._algorithm.updates.count > 1))
        )

    @torch.no_grad()
    def _forward_pass(self) -> None:
        """Fill ``_known`` for the whole batch: ``logprobs``, ``reference``, and ``values``, float32
        [T] each."""
        models = self._models
        index = self._index = TokenIndex(self._samples)
        self._whole = models.pack(self._samples, range(len(self._samples)))
        wanted = {"logprobs": self._needs.old_logprobs, "reference": self._needs.reference, "values": self._needs.critic}
        self._known = {name: torch.zeros(index.size) for name, needed in wanted.items() if needed}
        for batch, mine in models.ranks.deal(self._whole):
            slots = index.of(batch)
            found: dict[str, Tensor] = {}
            on_policy = models.critic is not None and models.critic.on_policy
            policy = None
            if "logprobs" in self._known or on_policy:
                policy = models.policy.logprobs(batch, temperature=models.temperature, hidden=on_policy)
            if policy is not None:
                found["logprobs"] = policy.tokens
            if models.critic is not None:
                found["values"] = models.critic.values(batch, policy.hidden if policy else None)
            if models.reference is not None:
                found["reference"] = models.reference.logprobs(batch, temperature=models.temperature)
            for name in self._known.keys() & found.keys() if mine else ():
                self._known[name][slots] = found[name].cpu()
        models.ranks.add_up(list(self._known.values()))

    def _estimate(self, rewards: Tensor) -> None:
        """Set the advantages and their metrics."""
        algorithm, samples = self._algorithm, self._samples
        by_token = _by_parts(samples)
        if algorithm.advantages is not None and not by_token:
            first, sample = _distinct(samples)
            groups = torch.unique(_compared(samples, self._groups)[first], return_inverse=True)[1]
            advantages = algorithm.advantages(rewards[first], groups)[sample]
            active = torch.zeros(self._number).index_add_(0, self._groups, (advantages != 0).float())
            self.metrics["zero_advantage_groups"] = float((active == 0).float().mean())
            self._advantages = advantages.float()
        elif algorithm.estimate is not None:
            found = algorithm.estimate(self._estimator_batch(rewards, by_token))
            self.metrics |= found.metrics
            self._advantages, self._by_token = found.advantages.float(), True
            if found.returns is not None:
                self._known["returns"] = found.returns.float()

    def _estimator_batch(self, rewards: Tensor, by_token: bool) -> EstimatorBatch:
        samples = self._samples
        self._index = index = self._index or TokenIndex(samples)
        known: Mapping[str, Tensor] = {name: tensor.double() for name, tensor in self._known.items()}
        return EstimatorBatch(
            rewards=rewards,
            groups=torch.unique(_compared(samples, self._groups), return_inverse=True)[1],
            sample=index.sample,
            token_rewards=index.gather([_parts(s) for s in samples]) if by_token else None,
            logprobs=known.get("logprobs"),
            reference_logprobs=known.get("reference"),
            values=known.get("values"),
            kl_coefficient=self._models.kl_coefficient,
        )

    def _teacher_logprobs(self, batch: MicroBatch, like: Tensor) -> Tensor:
        """float32 [N]: the teacher's logprobs, computed here or read from the samples."""
        models = self._models
        if models.teacher is not None:
            return models.teacher.logprobs(batch, temperature=models.temperature)
        found = np.empty(len(batch.sample), np.float32)
        for number in np.unique(batch.sample):
            logprobs, here = self._samples[number].teacher_logprobs, batch.sample == number
            assert logprobs is not None
            found[here] = logprobs[batch.place[here]]
        return torch.from_numpy(found).to(like.device)

    def _tokens(self, batch: MicroBatch, policy: Logprobs, slots: Tensor | None, top: tuple[Tensor, Tensor] | None) -> TokenBatch:
        models, needs, tokens = self._models, self._needs, policy.tokens
        sample = torch.from_numpy(batch.sample)
        advantages = self._advantages
        if advantages is not None:
            advantages = advantages[slots if self._by_token else sample].to(tokens.device)
        reference = None
        if needs.reference and models.reference is not None:
            if "reference" in self._known:
                assert slots is not None
                reference = self._at("reference", slots, tokens)
            else:
                reference = models.reference.logprobs(batch, temperature=models.temperature)
        teacher = None
        if needs.teacher and top is None:
            teacher = self._teacher_logprobs(batch, tokens)
        old = None
        if "logprobs" in self._known and self._algorithm.updates.count > 1:
            assert slots is not None
            old = self._at("logprobs", slots, tokens)
        entropy = None
        if needs.entropy:
            entropy = policy.entropy[torch.from_numpy(batch.predictor).to(tokens.device)]
        return TokenBatch(
            logprobs=tokens,
            normalizer=self._normalizer,
            samples=self._count,
            sample=sample.to(tokens.device),
            advantages=advantages,
            old_logprobs=old,
            engine_logprobs=torch.from_numpy(batch.engine_logprobs).to(tokens.device) if needs.engine_logprobs else None,
            reference_logprobs=reference,
            teacher_logprobs=teacher,
            teacher_top=None if top is None else top[0],
            top_logprobs=None if top is None else top[1],
            entropy=entropy,
            kl_coefficient=models.kl_coefficient,
        )

    def _at(self, name: str, slots: Tensor, like: Tensor) -> Tensor:
        return self._known[name][slots].to(like.device)

    def _measured(self, batch: MicroBatch, policy: Logprobs, slots: Tensor | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Sums and maxima of the metrics of every algorithm over the micro-batch's tokens.

        The engine is compared with the policy before the first update, if its logprobs are known:
        later updates change the policy.
        """
        repeats = torch.from_numpy(np.bincount(batch.predictor, minlength=len(batch.predictors)))
        sums = {"entropy": (policy.entropy.detach() * repeats.to(policy.entropy.device)).sum()}
        maxima: dict[str, Tensor] = {}
        if self._needs.sampled:
            engine = torch.from_numpy(batch.engine_logprobs).to(policy.tokens.device)
            learner = policy.tokens.detach()
            if slots is not None and "logprobs" in self._known:
                learner = self._at("logprobs", slots, learner)
            sums["mismatch/kl"] = k3(engine, learner).sum()
            if len(engine):
                maxima["mismatch/max_ratio"] = bounded_exp((learner - engine).abs().max())
        return sums, maxima


def _trained(samples: Sequence[TrainSample]) -> float:
    masks = [sample.loss_mask for sample in samples]
    if not masks:
        return 0.0
    lengths = np.array([len(mask) for mask in masks])
    trained = np.concatenate(masks) != 0
    trained[(np.cumsum(lengths) - lengths)[lengths > 0]] = False  # no position predicts the first token
    return float(np.count_nonzero(trained))


def _distinct(samples: Sequence[TrainSample]) -> tuple[Tensor, Tensor]:
    """int64 [D], int64 [S]: the first part of each sample, and the sample of each part. A sample of
    several parts is one in the baseline of its group; a child session with its own reward is
    one, too."""
    places: dict[tuple[str, int], int] = {}
    first: list[int] = []
    sample: list[int] = []
    for at, part in enumerate(samples):
        key = part.group_key, part.sample if part.has_own_reward else part.sample - part.part
        if key not in places:
            places[key] = len(first)
            first.append(at)
        sample.append(places[key])
    return torch.tensor(first, dtype=torch.int64), torch.tensor(sample, dtype=torch.int64)


def _compared(samples: Sequence[TrainSample], groups: Tensor) -> Tensor:
    """int64 [S]: the group in which each sample is compared. The child sessions with rewards of
    their own are a group next to the one that they belong to."""
    own = torch.from_numpy(np.array([sample.has_own_reward for sample in samples], np.int64))
    return 2 * groups + own


def _by_parts(samples: Sequence[TrainSample]) -> bool:
    return any(sample.token_rewards is not None for sample in samples)


def _without_loss(sample: TrainSample) -> TrainSample:
    return dataclasses.replace(sample, loss_mask=np.zeros_like(sample.loss_mask))


def _lengths(samples: Sequence[TrainSample]) -> Tensor:
    """int64 [S]: the number of sampled tokens, without those of an environment."""
    return torch.tensor([int(np.count_nonzero(sample.loss_mask[sample.prompt_length :])) for sample in samples])


def _truncated(samples: Sequence[TrainSample]) -> Tensor:
    return torch.from_numpy(np.array([sample.truncated for sample in samples], np.bool_))


def _parts(sample: TrainSample) -> np.ndarray:
    """float32 [T]: the token rewards. Without them the reward of the sample is at its last trained
    token, and may be 0."""
    if sample.token_rewards is not None:
        return sample.token_rewards
    parts = np.zeros(len(sample.token_ids), np.float32)
    parts[np.flatnonzero(sample.loss_mask)[-1:]] = NOTHING
    return parts
