"""Replaces the engine and the trainer of workers by those without a model."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any, cast

from rollout.config.v1.run_config_pb2 import RunConfig
from rollout.run.v1.run_pb2 import WorkerSpec

PACE_VARIABLE = "ROLLOUT_SIM_SECONDS"
"""The longest duration of a sample in seconds; 0 if it is not set."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the trainer without a model."""

    off_policy: bool
    acting: Any = None  # the policies that act, of which this trainer has none
    refusals: Any = None  # the policy for refused gradients, which never occur here


class _Unused:
    """Replaces names that workers import but never call here."""


class _NoTorch(MetaPathFinder):
    """Raises an error if a worker without a model imports torch, which would take ten seconds."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname == "torch":
            raise ImportError("a worker without a model imports torch: replace that module in rollout_testing.sim.install")


def install() -> None:
    """Replace the modules that import torch. Call it before the workers' modules are imported."""
    sys.meta_path.insert(0, _NoTorch())
    weights = _package("rollout_workers.weights")
    # imports rollout_workers.weights.transfer, so it comes after the replacement of its parent
    from rollout_testing.sim import policy

    _fill(
        weights,
        WeightsDigest=policy.WeightsDigest,
        WeightsManifest=policy.WeightsManifest,
        read_manifest=policy.read_manifest,
        seal=policy.seal,
        stage_folder=policy.stage_folder,
    )
    learner = _package("rollout_workers.trainer")
    types = importlib.import_module("rollout_workers.trainer.types")
    _fill(learner, **{name: getattr(types, name) for name in _LEARNER_TYPES})
    from rollout_testing.sim.trainer import SimTrainer

    _fill(learner, Trainer=SimTrainer, TrainerConfig=Settings, AdamWConfig=_Unused, Schedule=_Unused)
    settings = ModuleType("rollout_workers.learner.settings")
    _fill(settings, trainer_config=trainer_config, lasting=lasting, refusals=lambda *_: None)
    sys.modules[settings.__name__] = settings
    worker = importlib.import_module("rollout_workers.inference.worker")
    _fill(worker, load=load)
    feed = importlib.import_module("rollout_workers.learner.feed")
    _fill(feed, load_text=load_text)
    loader = importlib.import_module("rollout_workers.worker.spec").load_spec
    main = importlib.import_module("rollout_workers.__main__")
    _fill(main, load_spec=_watching(loader))


_LEARNER_TYPES = (
    "BadBatch",
    "LearnerError",
    "NonFiniteGradient",
    "StateUnreadable",
    "StepOutOfTurn",
    "StepResult",
    "TrainSample",
)


def trainer_config(config: RunConfig, threads: int, *_: Any) -> Settings:
    """Replaces ``rollout_workers.learner.settings.trainer_config``."""
    return Settings(off_policy=config.mode == "async")


def lasting(config: RunConfig, step: int) -> bool:
    """Replaces ``rollout_workers.learner.settings.lasting``."""
    every = config.snapshot.every_steps
    return step >= config.train.steps or bool(every and step % every == 0)


def load(spec: WorkerSpec, *_: Any) -> Any:
    """Replaces ``rollout_workers.inference.model.load``."""
    from rollout_testing.sim import policy
    from rollout_testing.sim.engine import CAPABILITIES, SimEngine, SimText
    from rollout_testing.sim.journal import Journal
    from rollout_testing.sim.recorded import Recorded
    from rollout_workers.engines.base import Engine
    from rollout_workers.inference.model import Model
    from rollout_workers.worker.spec import model_directory

    folder = spec.initial_weights or model_directory(spec)
    pace = float(os.environ.get(PACE_VARIABLE, "0"))
    journal, began = (Journal(spec.run_directory, name) for name in (spec.worker_id, f"began-{spec.worker_id}"))
    engine = SimEngine(folder, spec.initial_version, spec.plan.config.engine.slots, pace, began)
    recorded = cast("Engine", Recorded(engine, journal, policy.digest(engine.words).root))
    return Model(recorded, SimText(), kind="simulated", capabilities=CAPABILITIES)


def load_text(_: WorkerSpec) -> Any:
    """Replaces ``rollout_workers.learner.feed.load_text``."""
    from rollout_testing.sim.engine import SimText

    return SimText()


def _watching(load_spec: Callable[..., WorkerSpec]) -> Callable[..., WorkerSpec]:
    """Start the journal and the crash points when the spec is read, because it has the run's id."""

    def watched(path: str | None = None, **given: Any) -> WorkerSpec:
        from rollout_testing.sim import crash
        from rollout_testing.sim.journal import Journal
        from rollout_testing.sim.trainer import SimTrainer

        spec = load_spec(path, **given)
        if spec.kind == "learner":
            SimTrainer.journal = Journal(spec.run_directory, spec.worker_id)
        crash.arm(spec)
        return spec

    return watched


def _package(name: str) -> ModuleType:
    """A package without the imports of its ``__init__``; its modules are still found in its
    folder."""
    found = importlib.util.find_spec(name)
    assert found is not None and found.submodule_search_locations is not None
    package = ModuleType(name)
    package.__path__ = list(found.submodule_search_locations)
    sys.modules[name] = package
    return package


def _fill(module: ModuleType, **names: Any) -> None:
    for name, value in names.items():
        setattr(module, name, value)
