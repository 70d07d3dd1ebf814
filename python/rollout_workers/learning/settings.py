"""The trainer's settings from a run config."""

from __future__ import annotations

from typing import Any

import torch

from rollout.config.v1.run_config_pb2 import RunConfig
from rollout_workers.algorithms.grpo import GrpoConfig
from rollout_workers.algorithms.sft import SftConfig
from rollout_workers.learner import AdamWConfig, LoraConfig, Schedule, TrainerConfig


def trainer_config(config: RunConfig, threads: int) -> TrainerConfig:
    """Every field of ``train`` and ``algorithm``. threads: of the worker's spec; 0: all cores."""
    train = config.train
    name = str(config.algorithm.WhichOneof("kind"))
    return TrainerConfig(
        algorithm=name,
        settings=_settings(config, name),
        schedule=Schedule(peak=train.learning_rate, shape=train.schedule, warmup_steps=train.warmup_steps, steps=train.steps),
        optimizer=AdamWConfig(
            weight_decay=train.weight_decay,
            beta1=train.beta1,
            beta2=train.beta2,
            epsilon=train.epsilon,
            max_grad_norm=train.max_grad_norm,
        ),
        temperature=config.sampling.temperature,
        tokens_per_microbatch=train.tokens_per_microbatch,
        threads=threads,
        dtype=getattr(torch, config.model.dtype),
        seed=config.seed,
        lora=_lora(config),
        freeze=tuple(train.freeze),
        gradient_checkpointing=train.gradient_checkpointing,
    )


def lasting(config: RunConfig, step: int) -> bool:
    """Whether the weights of a step outlive the learner: those of a snapshot, and those that the run ends with."""
    every = config.snapshot.every_steps
    return step >= config.train.steps or bool(every and step % every == 0)


def _lora(config: RunConfig) -> LoraConfig | None:
    if not config.HasField("lora"):
        return None
    lora = config.lora
    return LoraConfig(rank=lora.rank, alpha=lora.alpha, targets=tuple(lora.targets), dora=lora.dora)


def _settings(config: RunConfig, name: str) -> Any:
    if name == "sft":
        return SftConfig()
    grpo = config.algorithm.grpo
    return GrpoConfig(
        clip_low=grpo.clip_low,
        clip_high=grpo.clip_high,
        kl_coefficient=grpo.kl_coefficient,
        normalize_std=grpo.normalize_std,
        off_policy=config.mode == "async",
        importance_cap=grpo.importance_cap,
    )
