"""Every key of a plan that the learner uses reaches its trainer."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest
import torch
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor

from rollout.config.v1 import options_pb2
from rollout.config.v1.run_config_pb2 import RunConfig
from rollout.event.v1.event_pb2 import LEVEL_ERROR, LEVEL_WARN
from rollout.run.v1.run_pb2 import WorkerSpec
from rollout_workers.learner.payload import read_segments
from rollout_workers.learner.ranks import Team
from rollout_workers.learner.worker import run_learner_worker
from rollout_workers.trainer import ActingConfig, AdamWConfig, LoraConfig, NonFiniteGradient, Schedule, TrainerConfig
from rollout_workers.trainer.refusal import Refusals
from rollout_workers.worker.credential import NO_TOKEN
from rollout_workers.worker.events import Events
from rollout_workers.worker.heartbeat import Heartbeat
from rollout_workers.worker.lifecycle import Lifecycle
from rollout_workers.worker.spec import Identity

from .batches import batch, trajectories

# key of the plan: (a value that is not its default, its path in the trainer's config, the expected
# value there).
REACHES: dict[str, tuple[Any, str, Any]] = {
    "seed": (7, "seed", 7),
    "deterministic": (False, "deterministic", False),
    "model.dtype": ("bfloat16", "dtype", torch.bfloat16),
    "sampling.temperature": (0.75, "temperature", 0.75),
    "train.steps": (9, "schedule.steps", 9),
    "train.learning_rate": (0.25, "schedule.peak", 0.25),
    "train.schedule": ("cosine", "schedule.shape", "cosine"),
    "train.warmup_steps": (3, "schedule.warmup_steps", 3),
    "train.weight_decay": (0.01, "optimizer.weight_decay", 0.01),
    "train.beta1": (0.8, "optimizer.beta1", 0.8),
    "train.beta2": (0.95, "optimizer.beta2", 0.95),
    "train.epsilon": (1e-6, "optimizer.epsilon", 1e-6),
    "train.max_grad_norm": (0.5, "optimizer.max_grad_norm", 0.5),
    "train.optimizer": ("adamw_8bit", "optimizer.kind", "adamw_8bit"),
    "train.ema_decay": (0.99, "optimizer.ema_decay", 0.99),
    "train.tokens_per_microbatch": (512, "tokens_per_microbatch", 512),
    "train.freeze": (["model.embed*", "lm_head*"], "freeze", ("model.embed*", "lm_head*")),
    "train.gradient_checkpointing": (True, "gradient_checkpointing", True),
    "train.refuse_grad_norm": (40.0, "refuse_grad_norm", 40.0),
    "train.on_refused_gradient": ("restore", "refusals.action", "restore"),
    "lora.rank": (5, "lora.rank", 5),
    "lora.alpha": (11.0, "lora.alpha", 11.0),
    "lora.targets": (["q_proj", "v_proj"], "lora.targets", ("q_proj", "v_proj")),
    "lora.dora": (True, "lora.dora", True),
    "multistep.reward_type": ("action_level", "acting.reward_type", "action_level"),
    "multistep.logprob_type": ("token_level", "acting.logprob_type", "token_level"),
    "multistep.trust_remote_code": (True, "acting.trust_remote_code", True),
}
# Keys of the tables `train` and `lora` that other components use, and the fields of the trainer's
# config that have other sources.
OTHERS = {
    "train.groups_per_step": "scheduler and buffer",
    "train.threads": "the scheduler, which gives the worker its share: `WorkerSpec.threads`",
    "train.deliver_every_steps": "learner-controller",
    "train.epochs": "the planner, which computes `train.steps`",
    "train.ranks": "the worker's Team, tests/learner/test_ranks.py",
}
ELSEWHERE = {
    "algorithm",
    "settings",
    "threads",
    "refusals.folder",
    "refusals.notify",
}  # each with a test below, or test_settings.py
NESTED = {"schedule": Schedule, "optimizer": AdamWConfig, "lora": LoraConfig, "refusals": Refusals, "acting": ActingConfig}


class Stopped(Exception):
    """Raised when the worker creates the trainer."""


class FakeTeam:
    """Replaces a learner's ranks, and records the arguments of the trainer."""

    model_dir: str
    settings: TrainerConfig

    def trainer(self, model_dir: str, settings: TrainerConfig) -> NoReturn:
        self.model_dir, self.settings = model_dir, settings
        raise Stopped

    def close(self) -> None:
        pass


async def made(plan: dict[str, Any], tmp_path: Path) -> tuple[FakeTeam, Events]:
    """The trainer's config that the worker creates, and its events, which are not sent."""
    spec = WorkerSpec(
        worker_id="learner-0", kind="learner", run_id="run-x", base_dir=str(tmp_path), run_directory=str(tmp_path / "run"),
        consul_address="127.0.0.1:1", threads=3,
    )  # fmt: skip
    spec.plan.format = 1
    json_format.ParseDict(plan, spec.plan.config)
    team, heartbeat = FakeTeam(), Heartbeat("nats://127.0.0.1:1", NO_TOKEN, name="unused")
    events = Events(Identity("run-x", "learner-0", "learner", 0), heartbeat)
    with pytest.raises(Stopped):
        await run_learner_worker(
            spec, Identity("run-x", "learner-0", "learner", 0), Lifecycle(), heartbeat, events, cast("Team", team)
        )
    return team, events


def plan(**changes: dict[str, Any]) -> dict[str, Any]:
    """A plan with the value of the table for each key. changes: to tables."""
    tables: dict[str, Any] = {"mode": "async", "algorithm": {"rloo": {"loss": {"clip_low": 0.125}}}}
    for key, (value, _, _) in REACHES.items():
        *table, name = key.split(".")
        (tables.setdefault(table[0], {}) if table else tables)[name] = value
    tables["model"]["path"] = "models/tiny"
    return {**tables, **{table: {**tables.get(table, {}), **change} for table, change in changes.items()}}


def fields_of(table: str) -> dict[str, FieldDescriptor]:
    """The contract's fields of a table by name; for the empty name those of the plan."""
    message = RunConfig.DESCRIPTOR.fields_by_name[table].message_type if table else RunConfig.DESCRIPTOR
    assert message is not None
    return dict(message.fields_by_name)


def at(settings: TrainerConfig, path: str) -> Any:
    """``schedule.peak`` of a trainer's config."""
    found: Any = settings
    for name in path.split("."):
        found = getattr(found, name)
    return found


def paths() -> Iterator[str]:
    """All fields of a trainer's config."""
    for field in dataclasses.fields(TrainerConfig):
        if field.name in NESTED:
            yield from (f"{field.name}.{inner.name}" for inner in dataclasses.fields(NESTED[field.name]))
        else:
            yield field.name


async def test_every_key_reaches_the_trainer(tmp_path: Path) -> None:
    team, _ = await made(plan(), tmp_path)
    wanted = {key: value for key, (_, _, value) in REACHES.items()}
    assert {key: at(team.settings, path) for key, (_, path, _) in REACHES.items()} == wanted
    assert team.settings.threads == 3
    assert (team.settings.algorithm, team.settings.settings.clip_low, team.settings.settings.off_policy) == ("rloo", 0.125, True)
    assert team.model_dir == str(tmp_path / "models/tiny")


async def test_without_the_table_no_adapters_are_trained(tmp_path: Path) -> None:
    given = plan()
    del given["lora"]
    assert (await made(given, tmp_path))[0].settings.lora is None


@pytest.mark.parametrize("action", ["stop", "skip", "restore"])
async def test_a_refused_gradient_is_handled_as_planned(action: str, tmp_path: Path) -> None:
    team, events = await made(plan(train={"on_refused_gradient": action}), tmp_path)
    samples = read_segments(batch("run-x", 4, trajectories("run-x", 4, version=3), tmp_path))
    refused = team.settings.refusals.record(4, samples, NonFiniteGradient("a gradient of inf"))
    assert refused.action == action
    assert Path(refused.batch).parent == tmp_path / "run" / "refused" and Path(refused.batch).exists()
    events._release(all=True)
    [event] = [event for event in events._buffered if event.kind == "step.refused"]
    assert event.level == (LEVEL_ERROR if action == "stop" else LEVEL_WARN)
    assert dict(event.attributes) == {"reason": "NON_FINITE_GRADIENT", "action": action, "batch": refused.batch}
    assert event.step == 4 and "a gradient of inf" in event.message


def test_the_table_has_every_key_and_every_setting() -> None:
    """A new key of `train` or `lora` must be added to ``REACHES``, or to ``OTHERS`` with the
    component that uses it."""
    keys = {f"{table}.{name}" for table in ("train", "lora") for name in fields_of(table)}
    known = {key for key in REACHES if key.startswith(("train.", "lora."))}
    assert keys == known | OTHERS.keys() and not known & OTHERS.keys()
    assert {path for _, path, _ in REACHES.values()} | ELSEWHERE == set(paths())


@pytest.mark.parametrize("key", REACHES)
def test_no_value_in_the_table_is_a_default(key: str) -> None:
    """No value equals the default of the contract or the dataclass, because a dropped key would
    then go unnoticed."""
    value, path, wanted = REACHES[key]
    default = fields_of(key.rpartition(".")[0])[key.rpartition(".")[2]].GetOptions().Extensions[options_pb2.meta].default
    assert not default or tomllib.loads(f"v = {default}")["v"] != value
    *table, name = path.split(".")
    fields = {field.name: field.default for field in dataclasses.fields(NESTED[table[0]] if table else TrainerConfig)}
    assert fields[name] != wanted
