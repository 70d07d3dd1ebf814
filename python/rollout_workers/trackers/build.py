"""Builds the sinks of a run from its configuration."""

from __future__ import annotations

import os
from pathlib import Path

from google.protobuf import json_format

from rollout.config.v1.run_config_pb2 import RunConfig, SinksConfig
from rollout_workers.trackers.mlflow import Mlflow
from rollout_workers.trackers.tensorboard import TensorBoard
from rollout_workers.trackers.types import Facts, Sink
from rollout_workers.trackers.wandb import Wandb


def facts_of(config: RunConfig, run_id: str, directory: str, base_dir: str) -> Facts:
    """The description of the run that trackers show."""
    plain = json_format.MessageToDict(config, preserving_proto_field_name=True)
    plain.pop("sinks", None)
    return Facts(run_id, config.name, directory, base_dir, plain)


def sinks_of(config: SinksConfig, facts: Facts) -> list[Sink]:
    """One sink for each configured table. Does not open them."""
    own = Path(facts.directory) / "sinks"

    def place(named: str) -> Path:
        return Path(os.path.abspath(os.path.join(facts.base_dir, named))) if named else own

    sinks: list[Sink] = []
    if config.HasField("tensorboard"):
        named = config.tensorboard.directory
        sinks.append(TensorBoard(facts, place(named) / (f"{facts.name}-{facts.run_id}" if named else "tensorboard")))
    if config.HasField("wandb"):
        wandb = config.wandb
        sinks.append(Wandb(facts, place(wandb.directory), project=wandb.project, entity=wandb.entity, mode=wandb.mode))
    if config.HasField("mlflow"):
        mlflow = config.mlflow
        uri, artifacts = tracking(mlflow.tracking_uri, facts.base_dir, own)
        sinks.append(Mlflow(facts, tracking_uri=uri, experiment=mlflow.experiment, artifacts=artifacts))
    return sinks


def tracking(uri: str, base_dir: str, own: Path) -> tuple[str, Path | None]:
    """The URI with paths resolved from ``base_dir``, and the folder for artifacts if the store is
    local."""
    if not uri:
        return f"sqlite:///{own / 'mlflow.db'}", own / "mlflow"
    if uri.startswith("sqlite:///"):
        path = Path(os.path.abspath(os.path.join(base_dir, uri.removeprefix("sqlite:///"))))
        return f"sqlite:///{path}", path.parent / f"{path.stem}-artifacts"
    if "://" not in uri and not uri.startswith(("file:", "databricks")):
        return Path(os.path.abspath(os.path.join(base_dir, uri))).as_uri(), None
    return uri, None
