"""What TRL 1.16 makes of a batch: its trainers' own loss functions, called as they are on logprobs
in place of a model's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

from .batches import VOCABULARY, Batch

Result = tuple[Tensor, Tensor]
"""The loss, scalar, and its gradient in the shape of what was differentiated."""


class Accelerator:
    """One process."""

    num_processes, sync_gradients, device = 1, True, torch.device("cpu")

    def gather(self, value: Tensor) -> Tensor:
        return value

    gather_for_metrics = gather

    def reduce(self, value: Tensor, reduction: str = "sum") -> Tensor:
        return value


def trainer(kind: type, **attributes: Any) -> Any:
    """A trainer that was never set up: only what its loss reads."""
    made = object.__new__(kind)
    shared = {"_metrics": {"train": defaultdict(list)}, "accelerator": Accelerator(), "aux_loss_enabled": False}
    made.__dict__.update(shared, model=SimpleNamespace(training=True), _total_train_tokens=0, _tp_size=1, **attributes)
    return made


def grpo(batch: Batch, *, kl: float = 0.0, entropy: float = 0.0, **settings: Any) -> Result:
    logprobs = batch["logprobs"].clone().requires_grad_()
    defaults: dict[str, Any] = {
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
    }
    made = trainer(
        GRPOTrainer,
        beta=kl,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        use_adaptive_entropy=False,
        entropy_coef=entropy,
        _entropy_bonus_enabled=entropy > 0,
        current_gradient_accumulation_steps=1,
        max_completion_length=32,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, batch["entropy"], None),
        **{**defaults, **settings},
    )
    mask = batch["mask"]
    ids = torch.zeros_like(mask, dtype=torch.long)
    inputs = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": mask}
    inputs |= {"advantages": batch["advantages"], "old_per_token_logps": batch["old"]}
    inputs |= {"ref_per_token_logps": batch["reference"], "num_items_in_batch": mask.sum()}
    return _result(made._compute_loss(made.model, inputs), logprobs)


def rloo(batch: Batch) -> Result:
    logprobs = batch["logprobs"].clone().requires_grad_()
    made = trainer(
        RLOOTrainer,
        epsilon_low=0.2,
        epsilon_high=0.2,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, batch["entropy"], None),
    )
    mask = batch["mask"]
    ids = torch.zeros_like(mask, dtype=torch.long)
    inputs = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": mask}
    inputs |= {"advantages": batch["advantages"], "old_logps": (batch["old"] * mask).sum(1)}
    return _result(made._compute_loss(made.model, inputs), logprobs)


def preference(batch: Batch, loss_type: str, *, label_smoothing: float = 0.0, beta: float = 0.1) -> Result:
    logprobs = batch["logprobs"].clone().requires_grad_()
    made = trainer(
        DPOTrainer,
        beta=beta,
        label_smoothing=label_smoothing,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        use_weighting=False,
    )
    mask = batch["mask"]
    reference = (batch["reference"] * mask).sum(1)
    completion = torch.cat((torch.zeros(len(mask), 1), mask), 1)
    inputs = {"input_ids": completion.long(), "attention_mask": completion, "completion_mask": completion}
    inputs |= {"ref_chosen_logps": reference.chunk(2)[0], "ref_rejected_logps": reference.chunk(2)[1]}
    return _result(made._compute_loss(_model(logprobs * mask), inputs, False), logprobs)


def smoothed_preference(batch: Batch, label_smoothing: float) -> Result:
    """TRL's "sigmoid" knows no smoothing; "aot" does, and is the same on one pair at a time."""
    pairs = len(batch["mask"]) // 2
    loss, gradient = torch.zeros(()), torch.zeros_like(batch["logprobs"])
    for pair in range(pairs):
        rows = torch.tensor([pair, pair + pairs])
        one = {name: batch[name][rows] for name in ("mask", "logprobs", "reference")}
        part = preference(one, "aot", label_smoothing=label_smoothing)
        loss = loss + part[0] / pairs
        gradient[rows] += part[1] / pairs
    return loss, gradient


def kto(batch: Batch, *, desirable: float = 1.0, undesirable: float = 1.0, loss_type: str = "kto") -> Result:
    logprobs = batch["logprobs"].clone().requires_grad_()
    made = trainer(
        KTOTrainer,
        beta=0.1,
        desirable_weight=desirable,
        undesirable_weight=undesirable,
        precompute_ref_logps=True,
        calculate_KL=loss_type == "kto",
        loss_type=loss_type,
        _compute_kl_logps=lambda *_: batch["mismatched"],
    )
    mask = batch["mask"]
    completion = torch.cat((torch.zeros(len(mask), 1), mask), 1)
    inputs = {"input_ids": completion.long(), "attention_mask": completion, "completion_mask": completion}
    inputs |= {"label": batch["desirable"], "ref_logps": (batch["reference"] * mask).sum(1)}
    inputs |= {"ref_KL_logps": batch["mismatched_reference"]}
    return _result(made._compute_loss(_model(logprobs * mask), inputs, False), logprobs)


def reward_model(batch: Batch, *, margin: bool = False, centering: float | None = None) -> Result:
    scores = batch["scores"].clone().requires_grad_()
    made = trainer(RewardTrainer, args=SimpleNamespace(center_rewards_coefficient=centering))
    inputs = {"attention_mask": batch["mask"], **({"margin": batch["margins"]} if margin else {})}
    return _result(made.compute_loss(lambda **_: SimpleNamespace(logits=scores[:, None]), inputs), scores)


def sft(batch: Batch) -> Result:
    """The loss of the models that TRL's SFTTrainer trains, with the tokens of the whole batch as
    its divisor."""
    logits = batch["logits"].clone().requires_grad_()
    labels = batch["labels"].masked_fill(batch["mask"] == 0, -100)
    shifted = torch.cat((torch.full((len(labels), 1), -100), labels), 1)
    padded = torch.cat((logits, torch.zeros(len(labels), 1, VOCABULARY)), 1)
    loss = ForCausalLMLoss(padded, shifted, VOCABULARY, num_items_in_batch=batch["mask"].sum())
    return _result(loss, logits)


LOSSES: dict[str, Callable[[Batch], Result]] = {
    "sft": sft,
    "grpo/token": grpo,
    "grpo/token kl": lambda b: grpo(b, kl=0.1),
    "grpo/token entropy": lambda b: grpo(b, entropy=0.01),
    "grpo/sequence": lambda b: grpo(b, loss_type="grpo"),
    "grpo/sequence kl": lambda b: grpo(b, loss_type="grpo", kl=0.1),
    "dapo": lambda b: grpo(b, epsilon_high=0.28),
    "dr_grpo": lambda b: grpo(b, loss_type="dr_grpo"),
    "gspo": lambda b: grpo(b, loss_type="grpo", importance_sampling_level="sequence", epsilon_low=3e-4, epsilon_high=4e-4),
    "gspo/wide": lambda b: grpo(b, loss_type="grpo", importance_sampling_level="sequence"),
    "cispo": lambda b: grpo(b, loss_type="cispo", epsilon_high=5.0),
    "rloo": rloo,
    "dpo": lambda b: preference(b, "sigmoid"),
    "dpo/smoothing": lambda b: smoothed_preference(b, 0.1),
    "ipo": lambda b: preference(b, "ipo"),
    "kto": kto,
    "kto/weights": lambda b: kto(b, desirable=1.3, undesirable=0.7),
    "kto/no reference point": lambda b: kto(b, loss_type="apo_zero_unpaired"),
    "reward_model": reward_model,
    "reward_model/margin": lambda b: reward_model(b, margin=True),
    "reward_model/centering": lambda b: reward_model(b, centering=0.01),
}


def _model(logprobs: Tensor) -> Callable[..., Any]:
    class Output:
        """Logprobs, and zeros for whatever is only measured."""

        log_probs = logprobs

        def __getattr__(self, name: str) -> Tensor:
            return torch.zeros_like(logprobs, dtype=torch.bool if name == "is_top1" else None)

    return lambda **_: Output()


def _result(loss: Any, leaf: Tensor) -> Result:
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient
