"""The metrics of a step.

| name | meaning |
|---|---|
| ``loss`` | the loss of the whole batch |
| ``reward/mean``, ``reward/std`` | over the batch's samples; std divides by their number |
| ``reward/NAME`` | mean of a metric or a part of the reward, over the samples that have it |
| ``zero_advantage_groups`` | share of groups without any advantage, such as groups of equal rewards |
| ``entropy`` | nats, mean over the computed trained tokens; without any, from the engine's logprobs of the sampled ones |
| ``mismatch/kl`` | KL(engine || learner before the step's first update), k3, mean over the same tokens |
| ``mismatch/max_ratio`` | largest p/q or q/p of the two probabilities of a token; 1 if they agree |
| ``kl/reference`` | KL(learner || initial model) by the loss's estimator, same tokens; in the reward: all trained tokens |
| ``kl/coefficient`` | the weight of that KL in this step |
| ``kl/update`` | KL(policy that acted || learner) over all updates, k3; of policies that act for many steps |
| ``kl/teacher`` | KL(learner || teacher), k1, over the same tokens; with ``teacher_top_k`` over those outcomes |
| ``teacher/covered`` | probability of the teacher's ``teacher_top_k`` tokens under it, mean over the same tokens |
| ``rewards/chosen``, ``rewards/rejected`` | sums of the (implicit) rewards of each kind, over pairs; KTO: over all samples |
| ``rewards/accuracy`` | share of pairs whose chosen completion has the higher reward |
| ``rewards/margin`` | mean reward of chosen minus rejected; KTO: only for batches with both kinds |
| ``desirable`` | KTO: share of desirable samples |
| ``clip_fraction`` | share of those tokens that are clipped |
| ``importance/weight`` | mean importance weight of those tokens, if they have one |
| ``importance/bounded`` | share of those tokens whose weight is at the cap, or masked |
| ``importance/masked`` | share of those tokens that a mask leaves out, with a mask |
| ``importance/masked_samples`` | share of the computed samples that ``importance_sample_mask`` leaves out |
| ``grad_norm`` | before clipping |
| ``learning_rate`` | the learning rate of this step; 0 while a critic warms up, and then no ``grad_norm`` |
| ``samples``, ``groups`` | in the batch |
| ``tokens`` | of the batch: prompts and completions |
| ``tokens/trained`` | tokens with a loss: the normalizer |
| ``tokens/computed`` | positions of the forward pass after skipping and prefix sharing, padding included |
| ``length/mean``, ``length/min``, ``length/max`` | of the completions, in tokens |
| ``staleness/max`` | steps between a sample's oldest weights and this step |
| ``staleness/share_N`` | share of samples N steps behind, up to the next N (0, 1, 2, 3, 5, 9); if any is behind |
| ``groups/equal_rewards`` | groups that the algorithm left out because their rewards are equal |
| ``tokens_per_second``, ``samples_per_second`` | of the batch, over ``time/step`` |
| ``time/pack`` | seconds before the first update: packing, and forward passes without gradient |
| ``time/forward``, ``time/backward``, ``time/optimizer``, ``time/step`` | seconds |
| ``updates`` | weight updates in this step, if several; ``loss`` and ``grad_norm`` are their means |
| ``refused`` | 1 if the gradient was refused and the step counts without it |

Other means over no tokens (every sample was skipped) are missing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import SupportsFloat

import numpy as np
import torch

from rollout_workers.algorithms.importance import staleness_histogram
from rollout_workers.trainer.types import TrainSample


def describe_batch(samples: Sequence[TrainSample], *, step: int, sampled: bool) -> dict[str, float]:
    """The metrics of the samples themselves. sampled: the policy sampled them, so rewards and
    versions apply. A sample of several parts has one reward, that of the first."""
    lengths = np.array([len(sample.token_ids) - sample.prompt_length for sample in samples])
    metrics = {
        "samples": float(len(samples)),
        "groups": float(len({sample.group_key for sample in samples})),
        "tokens": float(sum(len(sample.token_ids) for sample in samples)),
        "length/mean": float(lengths.mean()),
        "length/min": float(lengths.min()),
        "length/max": float(lengths.max()),
    }
    if sampled:
        rewards = np.array([sample.reward for sample in samples if not sample.part])
        metrics["reward/mean"] = float(rewards.mean())
        metrics["reward/std"] = float(rewards.std())
        metrics = _reward_metrics(samples) | metrics
        behind = [step - 1 - sample.version for sample in samples]
        metrics["staleness/max"] = float(max(behind))
        if metrics["staleness/max"] > 0:
            metrics |= staleness_histogram(behind)
    return metrics


def sampled_entropy(samples: Sequence[TrainSample]) -> dict[str, float]:
    """``entropy`` estimated from the logprobs of the tokens that the policy sampled, which are
    known without a forward pass; empty if no token was."""
    chosen = [-sample.logprobs[sample.loss_mask == 1].astype(np.float64) for sample in samples]
    logprobs = np.concatenate(chosen) if chosen else np.zeros(0)
    return {"entropy": float(logprobs.mean())} if len(logprobs) else {}


def _reward_metrics(samples: Sequence[TrainSample]) -> dict[str, float]:
    """The means of the reward function's own metrics."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.metrics.items():
            found.setdefault(f"reward/{name.removeprefix('reward/')}", []).append(value)
    return {name: float(np.mean(found[name])) for name in sorted(found)}


class TokenSums:
    """Sums and maxima over the computed tokens of all micro-batches, in float64."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._maxima: dict[str, float] = {}
        self._shares: dict[str, tuple[float, float]] = {}
        self._tokens = 0

    def add(
        self,
        tokens: int,
        sums: Mapping[str, SupportsFloat],
        maxima: Mapping[str, SupportsFloat],
        shares: Mapping[str, tuple[SupportsFloat, float]] | None = None,
    ) -> None:
        """Add a micro-batch's sums and maxima over its ``tokens`` tokens, and shares of others."""
        self._tokens += tokens
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value)
        for name, value in maxima.items():
            self._maxima[name] = max(self._maxima.get(name, -math.inf), float(value))
        for name, (value, count) in (shares or {}).items():
            before, counted = self._shares.get(name, (0.0, 0.0))
            self._shares[name] = before + float(value), counted + count

    def merge(self, others: Sequence[TokenSums]) -> None:
        """Replace the sums and maxima by those over all of ``others``."""
        parts = [(other._tokens, dict(other._sums), dict(other._maxima), dict(other._shares)) for other in others]
        self._sums, self._maxima, self._shares, self._tokens = {}, {}, {}, 0
        for part in parts:
            self.add(*part)

    def means(self) -> dict[str, float]:
        """The mean of each metric over all tokens, the maxima, and the shares; empty if there were
        none."""
        means = {name: value / self._tokens for name, value in self._sums.items()}
        shares = {name: value / count for name, (value, count) in self._shares.items() if count}
        return means | unpaired_margin(means) | self._maxima | shares


def unpaired_margin(means: Mapping[str, float]) -> dict[str, float]:
    """``rewards/margin`` of labeled completions, which form no pairs; empty if one of the two
    labels is missing.

    >>> unpaired_margin({"rewards/chosen": 0.3, "rewards/rejected": -0.1, "desirable": 0.75})
    {'rewards/margin': 0.8}
    """
    share = means.get("desirable", 0.0)
    if not 0 < share < 1:
        return {}
    return {"rewards/margin": means["rewards/chosen"] / share - means["rewards/rejected"] / (1 - share)}


class UpdateMeans:
    """Means over the weight updates of a step."""

    def __init__(self) -> None:
        self.count = 0
        self._loss = self._norm = self._computed = self._critic = 0.0

    def add(self, loss: float, norms: Sequence[float], computed: int) -> None:
        """Add an update. norms: of the policy's gradient and, if it has its own optimizer, the
        critic's."""
        self.count += 1
        self._loss, self._norm, self._computed = self._loss + loss, self._norm + norms[0], self._computed + computed
        self._critic += sum(norms[1:])

    def metrics(self) -> dict[str, float]:
        """The metrics of all updates."""
        metrics = {"loss": self._loss / self.count, "grad_norm": self._norm / self.count, "tokens/computed": self._computed}
        if self._critic:
            metrics["value/grad_norm"] = self._critic / self.count
        return metrics | ({"updates": float(self.count)} if self.count > 1 else {})


class PhaseTimer:
    """Seconds of the phases of a step."""

    def __init__(self) -> None:
        self._seconds = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the duration of the ``with`` block, including GPU work, to a phase."""
        started = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._seconds[phase] += time.perf_counter() - started

    def seconds(self) -> dict[str, float]:
        """``time/<phase>`` of each phase."""
        return {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}
