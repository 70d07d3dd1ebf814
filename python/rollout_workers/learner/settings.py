"""The trainer's settings from a run config."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from rollout.algorithm import name_of, settings_of
from rollout.config.v1.run_config_pb2 import RunConfig
from rollout.event.v1.event_pb2 import LEVEL_ERROR, LEVEL_WARN
from rollout_workers.algorithms import config_type
from rollout_workers.trainer import ActingConfig, AdamWConfig, LoraConfig, Schedule, TrainerConfig
from rollout_workers.trainer.refusal import Refusals, Refused
from rollout_workers.worker.events import Events
from rollout_workers.worker.spec import is_deterministic

ACTIONS = {
    "stop": "the run is paused until it is resumed or canceled",
    "skip": "the step counts, and the weights stay unchanged",
    "restore": "the step counts, with the weights of the last snapshot",
}


def trainer_config(config: RunConfig, threads: int, base_dir: str = "") -> TrainerConfig:
    """The trainer's settings from ``train`` and ``algorithm``. threads: number of CPU threads; 0:
    all cores. base_dir: the base of the plan's relative paths."""
    train = config.train
    return TrainerConfig(
        algorithm=name_of(config),
        settings=algorithm_settings(config, base_dir),
        schedule=Schedule(peak=train.learning_rate, shape=train.schedule, warmup_steps=train.warmup_steps, steps=train.steps),
        optimizer=AdamWConfig(
            weight_decay=train.weight_decay,
            beta1=train.beta1,
            beta2=train.beta2,
            epsilon=train.epsilon,
            max_grad_norm=train.max_grad_norm,
            kind=train.optimizer or "adamw",
            ema_decay=train.ema_decay,
        ),
        temperature=config.sampling.temperature,
        tokens_per_microbatch=train.tokens_per_microbatch,
        threads=threads,
        dtype=getattr(torch, config.model.dtype),
        seed=config.seed,
        lora=LoraConfig.of(config),
        freeze=tuple(train.freeze),
        gradient_checkpointing=train.gradient_checkpointing,
        deterministic=is_deterministic(config),
        refuse_grad_norm=train.refuse_grad_norm,
        acting=_acting(config),
    )


def _acting(config: RunConfig) -> ActingConfig | None:
    if not config.HasField("multistep"):
        return None
    multistep = config.multistep
    return ActingConfig(multistep.reward_type or "chunk_level", multistep.trust_remote_code, multistep.logprob_type)


def refusals(config: RunConfig, run_directory: str, events: Events) -> Refusals:
    """The policy for refused gradients; it emits the event ``step.refused``."""

    def notify(refused: Refused) -> None:
        events.emit(
            "step.refused",
            f"{refused.message}; {ACTIONS[refused.action]}; the batch is in {refused.batch}",
            level=LEVEL_ERROR if refused.action == "stop" else LEVEL_WARN,
            step=refused.step,
            attributes={"reason": refused.reason, "action": refused.action, "batch": refused.batch},
        )

    return Refusals(config.train.on_refused_gradient or "stop", Path(run_directory) / "refused", notify)


def lasting(config: RunConfig, step: int) -> bool:
    """Whether the weights of a step must outlive the learner. True for snapshots and the last
    step."""
    every = config.snapshot.every_steps
    return step >= config.train.steps or bool(every and step % every == 0)


def algorithm_settings(config: RunConfig, base_dir: str = "") -> Any:
    """The settings of the chosen algorithm as its dataclass, with the names of the config's table.

    A field without a value in the table or the plan keeps its default. ``off_policy`` and
    ``max_tokens`` come from the run.
    """
    name = name_of(config)
    table, expected = getattr(config.algorithm, name), config_type(name)
    known = {field.name for field in fields(expected)}
    given = {key: value for key, value in settings_of(table).items() if key in known}
    if "off_policy" in known:
        given["off_policy"] = config.mode == "async" or not is_deterministic(config)
    if "max_tokens" in known and config.sampling.HasField("max_tokens"):
        given["max_tokens"] = config.sampling.max_tokens
    if "teacher" in given:
        given["teacher"] = os.path.join(base_dir, str(given["teacher"]))
    return expected(**given)
