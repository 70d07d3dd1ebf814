"""What our losses make of the same batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rollout_workers.algorithms import (
    EstimatorBatch,
    LossTerms,
    PairBatch,
    ScoreBatch,
    TokenBatch,
    UnpairedBatch,
    ValueBatch,
    build_algorithm,
    config_type,
)
from rollout_workers.algorithms.divergence import ESTIMATORS, adapted_coefficient
from rollout_workers.algorithms.kto import reference_point
from rollout_workers.algorithms.reduction import reduce_tokens

from .batches import GROUPS, Batch

Result = tuple[Tensor, Tensor]


def tokens(batch: Batch, name: str, **settings: Any) -> Result:
    """A loss over tokens: the mask chooses them, flat, sample after sample."""
    algorithm = build_algorithm(name, config_type(name)(**settings))
    logprobs = batch["logprobs"].clone().requires_grad_()
    flat, chosen = flat_tokens(batch, logprobs)
    terms: LossTerms = algorithm.loss(flat)
    assert len(flat.logprobs) == int(chosen.sum())
    return _result(terms.loss, logprobs)


def flat_tokens(batch: Batch, logprobs: Tensor) -> tuple[TokenBatch, Tensor]:
    """The record of a padded batch, and its mask."""
    chosen = batch["mask"].bool()
    sample = chosen.nonzero()[:, 0]
    return TokenBatch(
        logprobs=logprobs[chosen],
        normalizer=float(chosen.sum()),
        samples=float(len(chosen)),
        sample=sample,
        advantages=batch["advantages"][sample],
        old_logprobs=batch["old"][chosen],
        engine_logprobs=batch["engine"][chosen],
        reference_logprobs=batch["reference"][chosen],
        teacher_logprobs=batch["reference"][chosen],
        entropy=batch["entropy"][chosen],
    ), chosen


def sft(batch: Batch) -> Result:
    logits = batch["logits"].clone().requires_grad_()
    logprobs = logits.log_softmax(-1).gather(-1, batch["labels"][..., None])[..., 0]
    flat, _ = flat_tokens(batch, logprobs)
    return _result(build_algorithm("sft").loss(flat).loss, logits)


def distillation(batch: Batch) -> Result:
    """On policy: the loss of ours is the policy gradient's up to a constant, the gradient is the
    same."""
    return tokens({**batch, "old": batch["logprobs"]}, "distillation")


def value(batch: Batch) -> Result:
    values = batch["values"].clone().requires_grad_()
    chosen = batch["mask"].bool()
    algorithm = build_algorithm("ppo", config_type("ppo")(value_coefficient=1.0))
    assert algorithm.value_loss is not None
    flat = ValueBatch(values[chosen], batch["old_values"][chosen], batch["returns"][chosen], float(chosen.sum()))
    return _result(algorithm.value_loss(flat).loss, values)


def divergence(batch: Batch, kind: str) -> Result:
    logprobs = batch["logprobs"].clone().requires_grad_()
    flat, chosen = flat_tokens(batch, logprobs)
    return _result(reduce_tokens(ESTIMATORS[kind](flat.logprobs, batch["reference"][chosen]), flat), logprobs)


def pairs(batch: Batch, name: str, **settings: Any) -> Result:
    """Rows 0 .. P-1 are the chosen completions of the pairs, the others the rejected ones."""
    logprobs = batch["logprobs"].clone().requires_grad_()
    mask = batch["mask"]
    chosen, rejected = (logprobs * mask).sum(1).chunk(2)
    reference = (batch["reference"] * mask).sum(1).chunk(2)
    lengths = mask.sum(1).long().chunk(2)
    record = PairBatch(chosen, rejected, *reference, *lengths, pairs=float(len(chosen)))
    return _result(build_algorithm(name, config_type(name)(**settings)).loss(record).loss, logprobs)


def unpaired(batch: Batch, **settings: Any) -> Result:
    logprobs = batch["logprobs"].clone().requires_grad_()
    mask = batch["mask"]
    config = config_type("kto")(**settings)
    point = reference_point(batch["mismatched"], batch["mismatched_reference"]) if config.reference_point else 0.0
    sums, reference = (logprobs * mask).sum(1), (batch["reference"] * mask).sum(1)
    record = UnpairedBatch(sums, reference, batch["desirable"], point, samples=float(len(mask)))
    return _result(build_algorithm("kto", config).loss(record).loss, logprobs)


def scores(batch: Batch, *, margin: bool = False, **settings: Any) -> Result:
    leaf = batch["scores"].clone().requires_grad_()
    chosen, rejected = leaf.chunk(2)
    record = ScoreBatch(chosen, rejected, float(len(chosen)), batch["margins"] if margin else None)
    return _result(build_algorithm("reward_model", config_type("reward_model")(**settings)).loss(record).loss, leaf)


def _weighted(correction: str, level: str) -> Callable[[Batch], Result]:
    settings = {"importance_correction": correction, "importance_level": level, "importance_cap": 2.0}
    return lambda b: tokens(b, "grpo", off_policy=True, **settings)


GSPO = {"clip_low": 3e-4, "clip_high": 4e-4}
LOSSES: dict[str, Callable[[Batch], Result]] = {
    "trl/sft": sft,
    "trl/grpo/token": lambda b: tokens(b, "grpo"),
    "trl/grpo/token kl": lambda b: tokens(b, "grpo", kl_coefficient=0.1),
    "trl/grpo/token entropy": lambda b: tokens(b, "grpo", entropy_coefficient=0.01),
    "trl/grpo/sequence": lambda b: tokens(b, "grpo", reduction="sequence"),
    "trl/grpo/sequence kl": lambda b: tokens(b, "grpo", reduction="sequence", kl_coefficient=0.1),
    "trl/dapo": lambda b: tokens(b, "dapo", max_tokens=32),
    "trl/dr_grpo": lambda b: tokens(b, "dr_grpo", max_tokens=32),
    "trl/gspo": lambda b: tokens(b, "gspo"),
    "trl/gspo/wide": lambda b: tokens(b, "gspo", clip_low=0.2, clip_high=0.2),
    "trl/cispo": lambda b: tokens(b, "cispo"),
    "trl/rloo": lambda b: tokens(b, "rloo"),
    "trl/dpo": lambda b: pairs(b, "dpo"),
    "trl/dpo/smoothing": lambda b: pairs(b, "dpo", label_smoothing=0.1),
    "trl/ipo": lambda b: pairs(b, "ipo"),
    "trl/kto": unpaired,
    "trl/kto/weights": lambda b: unpaired(b, desirable_weight=1.3, undesirable_weight=0.7),
    "trl/kto/no reference point": lambda b: unpaired(b, reference_point=False),
    "trl/reward_model": scores,
    "trl/reward_model/margin": lambda b: scores(b, margin=True),
    "trl/reward_model/centering": lambda b: scores(b, centering_coefficient=0.01),
    "verl/ppo": lambda b: tokens(b, "ppo"),
    "verl/ppo/dual clip": lambda b: tokens(b, "ppo", dual_clip=3.0),
    "verl/ppo/clip higher": lambda b: tokens(b, "ppo", clip_low=0.1, clip_high=0.28),
    "verl/ppo/value": value,
    "verl/gspo": lambda b: tokens(b, "gspo"),
    "verl/cispo": lambda b: tokens(b, "cispo"),
    "verl/kl/k1": lambda b: divergence(b, "k1"),
    "verl/kl/k2": lambda b: divergence(b, "k2"),
    "verl/kl/k3": lambda b: divergence(b, "k3"),
    "verl/importance/truncate token": _weighted("truncate", "token"),
    "verl/importance/truncate sequence": _weighted("truncate", "sequence"),
    "verl/importance/mask token": _weighted("mask", "token"),
    "verl/importance/mask sequence": _weighted("mask", "sequence"),
    "verl/distillation": distillation,
}


def estimates(batch: Batch) -> dict[str, Tensor]:
    """Advantages and returns, float64, in the shape of the batch."""
    chosen = batch["mask"].bool()
    sample = chosen.nonzero()[:, 0]

    scored = batch["rewards"] * chosen.any(1)  # verl puts a reward at the last token, so an empty completion has none

    def record(**change: Any) -> EstimatorBatch:
        flat = {"rewards": scored.double(), "groups": GROUPS, "sample": sample}
        flat["values"] = batch["old_values"][chosen].double()
        flat["logprobs"] = batch["old"][chosen].double()
        flat["reference_logprobs"] = batch["reference"][chosen].double()
        return EstimatorBatch(**{**flat, **change})

    def padded(flat: Tensor) -> Tensor:
        return torch.zeros(chosen.shape, dtype=torch.float64).masked_scatter(chosen, flat)

    def estimate(name: str, given: EstimatorBatch, **settings: Any) -> tuple[Tensor, Tensor]:
        algorithm = build_algorithm(name, config_type(name)(**settings))
        assert algorithm.estimate is not None
        found = algorithm.estimate(given)
        return padded(found.advantages), padded(found.advantages if found.returns is None else found.returns)

    shaped = record(token_rewards=batch["token_rewards"][chosen].double())
    gae, returns = estimate("ppo", shaped, kl_coefficient=0.0, gamma=0.99)
    kl_gae, kl_returns = estimate("ppo", record())
    return {
        "ppo/gae": gae,
        "ppo/returns": returns,
        "ppo/gae with kl": kl_gae,
        "ppo/returns with kl": kl_returns,
        "reinforce_pp": estimate("reinforce_pp", shaped, kl_coefficient=0.0)[0],
        "reinforce_pp/kl": estimate("reinforce_pp", record(), kl_coefficient=0.05)[0],
        "reinforce_pp/group baseline": estimate("reinforce_pp", record(), kl_coefficient=0.0, group_baseline=True)[0],
        "grpo": estimate("grpo", record())[0],
        "dr_grpo": estimate("dr_grpo", record(), max_tokens=32)[0],
        "rloo": estimate("rloo", record(), kl_coefficient=0.0)[0],
    }


def controller() -> Tensor:
    value, seen = 0.05, []
    for measured in (0.3, 0.05, 0.11, 0.0, 0.1):
        value = adapted_coefficient(value, measured, 64, target=0.1, horizon=1000)
        seen.append(value)
    return torch.tensor(seen, dtype=torch.float64)


def _result(loss: Tensor, leaf: Tensor) -> Result:
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient
