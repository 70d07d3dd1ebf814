"""What verl 0.9.1 makes of a batch: the functions of its ``core_algos`` and
``rollout_corr_helper``, called as they are."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from verl.trainer.ppo import core_algos as verl
from verl.trainer.ppo import rollout_corr_helper as correction
from verl.workers.config import FSDPActorConfig

from .batches import GROUPS, Batch

Result = tuple[Tensor, Tensor]


def policy(batch: Batch, loss: str, *, aggregation: str = "token-mean", weights: Tensor | None = None, **settings: Any) -> Result:
    logprobs = batch["logprobs"].clone().requires_grad_()
    config = FSDPActorConfig(rollout_n=4, ppo_micro_batch_size_per_gpu=1, **settings)
    found, _ = verl.get_policy_loss_fn(loss)(
        old_log_prob=batch["old"],
        log_prob=logprobs,
        advantages=batch["advantages"][:, None].expand_as(logprobs),
        response_mask=batch["mask"],
        loss_agg_mode=aggregation,
        config=config,
        rollout_is_weights=weights,
    )
    return _result(found, logprobs)


def weighted(batch: Batch, level: str, threshold: str | float) -> Result:
    """The decoupled objective: the clip against ``old``, the weight of ``old`` over ``engine``."""
    ratio = batch["old"] - batch["engine"]
    with patch.object(correction, "compute_is_metrics", lambda **_: {}):  # which divides by 0 where every token is masked
        weights, _ = correction.compute_rollout_correction_weights(ratio, batch["mask"], level, threshold)
    return policy(batch, "vanilla", weights=weights, clip_ratio_c=1e9)


def value(batch: Batch) -> Result:
    values = batch["values"].clone().requires_grad_()
    loss, _ = verl.compute_value_loss(values, batch["returns"], batch["old_values"], batch["mask"], 0.2)
    return _result(loss, values)


def divergence(batch: Batch, kind: str) -> Result:
    logprobs = batch["logprobs"].clone().requires_grad_()
    per_token = verl.kl_penalty_forward(logprobs, batch["reference"], kind)
    return _result(verl.agg_loss(per_token, batch["mask"], "token-mean"), logprobs)


LOSSES: dict[str, Callable[[Batch], Result]] = {
    "ppo": lambda b: policy(b, "vanilla", clip_ratio_c=1e9),
    "ppo/dual clip": lambda b: policy(b, "vanilla", clip_ratio_c=3.0),
    "ppo/clip higher": lambda b: policy(b, "vanilla", clip_ratio_c=1e9, clip_ratio_low=0.1, clip_ratio_high=0.28),
    "ppo/value": value,
    "gspo": lambda b: policy(b, "gspo", aggregation="seq-mean-token-mean", clip_ratio_low=3e-4, clip_ratio_high=4e-4),
    "cispo": lambda b: policy(b, "cispo", clip_ratio_low=1.0, clip_ratio_high=4.0),
    "kl/k1": lambda b: divergence(b, "k1"),
    "kl/k2": lambda b: divergence(b, "k2"),
    "kl/k3": lambda b: divergence(b, "k3"),
    "importance/truncate token": lambda b: weighted(b, "token", 2.0),
    "importance/truncate sequence": lambda b: weighted(b, "sequence", 2.0),
    "importance/mask token": lambda b: weighted(b, "token", "0.5_2.0"),
    "importance/mask sequence": lambda b: weighted(b, "sequence", "0.5_2.0"),
    "distillation": lambda b: _distillation(b),
}


def _distillation(batch: Batch) -> Result:
    """A policy gradient whose advantage is the log-ratio of teacher (here the reference) and
    student."""
    logprobs = batch["logprobs"].clone().requires_grad_()
    advantages = batch["reference"] - batch["logprobs"]
    config = SimpleNamespace(global_batch_info={})
    loss, _ = verl.compute_policy_loss_reinforce(batch["logprobs"], logprobs, advantages, batch["mask"], "token-mean", config)
    return _result(loss, logprobs)


def estimates(batch: Batch) -> dict[str, Tensor]:
    """Advantages (and returns) in the shape of the batch, 0 outside the mask; float64, as ours
    are."""
    mask = batch["mask"].double()
    last = _last(mask)
    rewards = last * batch["rewards"].double()[:, None]
    shaped = rewards + batch["token_rewards"].double()
    penalized = verl.compute_rewards(rewards, batch["old"].double(), batch["reference"].double(), 0.05) * mask
    groups = GROUPS.numpy()
    values = batch["old_values"].double() * mask
    config = SimpleNamespace(gamma=1.0)
    gae, returns = verl.compute_gae_advantage_return(shaped, values, mask, 0.99, 0.95)
    kl_gae, kl_returns = verl.compute_gae_advantage_return(penalized, values, mask, 1.0, 0.95)
    reinforce, _ = verl.compute_reinforce_plus_plus_outcome_advantage(shaped, mask, config=config)
    penalized_reinforce, _ = verl.compute_reinforce_plus_plus_outcome_advantage(penalized, mask, config=config)
    baseline, _ = verl.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards.clone(), mask, groups)
    found = {
        "ppo/gae": gae * mask,
        "ppo/returns": returns * mask,
        "ppo/gae with kl": kl_gae * mask,
        "ppo/returns with kl": kl_returns * mask,
        "reinforce_pp": reinforce,
        "reinforce_pp/kl": penalized_reinforce,
        "reinforce_pp/group baseline": baseline,
        "grpo": verl.compute_grpo_outcome_advantage(rewards.clone(), mask, groups, epsilon=1e-4)[0],
        "dr_grpo": verl.compute_grpo_outcome_advantage(rewards.clone(), mask, groups, norm_adv_by_std_in_grpo=False)[0],
        "rloo": verl.compute_rloo_outcome_advantage(rewards.clone(), mask, groups)[0],
    }
    if mask.sum() == 1:
        raise ValueError("verl can't whiten one token")
    return found


def controller() -> Tensor:
    """The adaptive KL coefficient over a few steps."""
    made = verl.AdaptiveKLController(0.05, 0.1, 1000)
    seen = []
    for divergence in (0.3, 0.05, 0.11, 0.0, 0.1):
        made.update(divergence, 64)
        seen.append(made.value)
    return torch.tensor(seen, dtype=torch.float64)


def _last(mask: Tensor) -> Tensor:
    """1 at the last place of each row's mask."""
    from_here = mask.flip(1).cumsum(1).flip(1)
    return mask * (from_here == 1)


def _result(loss: Tensor, leaf: Tensor) -> Result:
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient
