"""Writes a run to MLflow with the MLflow client.

The MLflow run has the tag ``rollout.run_id``, so a resumed run continues it. MLflow reports which
steps it already has.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollout_workers.trackers.types import COLUMNS, Facts, LibraryMissing, Record

TAG = "rollout.run_id"
_STATES = {"SUCCEEDED": "FINISHED", "FAILED": "FAILED", "CANCELLED": "KILLED", "INTERRUPTED": "KILLED"}
_MOST_PARAMETERS = 100  # of one call
_MOST_CHARACTERS = 500  # of a parameter; every store accepts this length


class Mlflow:
    """Writes metrics under their names, the configuration as parameters, and completions as one
    JSON table per step."""

    name = "mlflow"

    def __init__(self, facts: Facts, *, tracking_uri: str, experiment: str, artifacts: Path | None) -> None:
        """artifacts: folder for the experiment's files if the store is a local file; None lets the
        server choose."""
        self._facts, self._uri, self._experiment, self._artifacts = facts, tracking_uri, experiment, artifacts
        self._client: Any = None
        self._run = ""
        self._last: dict[str, int] = {}  # metric -> newest step
        self._tables: set[int] = set()

    def open(self) -> str:
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Param
        except ImportError as error:
            fix = "install `rollout-workers[mlflow]` into the workers' environment"
            raise LibraryMissing(f"the package mlflow can't be imported: {error}", fix=fix) from error
        if self._uri.startswith("sqlite:///"):
            Path(self._uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        self._client = client = MlflowClient(tracking_uri=self._uri)
        experiment = self._experiment_id()
        found = client.search_runs([experiment], filter_string=f"tags.`{TAG}` = '{self._facts.run_id}'", max_results=1)
        if found:
            self._run = found[0].info.run_id
            client.update_run(self._run, status="RUNNING")
            self._last = {key: max(m.step for m in client.get_metric_history(self._run, key)) for key in found[0].data.metrics}
            names = [Path(file.path).stem for file in client.list_artifacts(self._run, "completions")]
            self._tables = {int(digits[0]) for name in names if (digits := re.findall(r"\d+", name))}
        else:
            self._run = client.create_run(experiment, tags={TAG: self._facts.run_id}, run_name=self._facts.name).info.run_id
            self._last, self._tables = {}, set()
        parameters = [Param(key, value) for key, value in _flat(self._facts.config)]
        known = found[0].data.params if found else {}
        parameters = [p for p in parameters if p.key not in known]
        for start in range(0, len(parameters), _MOST_PARAMETERS):
            client.log_batch(self._run, params=parameters[start : start + _MOST_PARAMETERS])
        return f"{self._uri}, run {self._run}"

    def write(self, record: Record) -> bool:
        from mlflow.entities import Metric

        if record.kind == "completions":
            if record.step in self._tables:
                return False
            table = json.dumps({"columns": list(COLUMNS), "data": [list(row) for row in record.rows]}, ensure_ascii=False)
            self._client.log_text(self._run, table, f"completions/step-{record.step:08d}.json")
            self._tables.add(record.step)
            return True
        milliseconds = int(record.seconds * 1000)
        fresh = {name: value for name, value in record.metrics.items() if record.step > self._last.get(name, -1)}
        if not fresh:
            return False
        metrics = [Metric(name, value, milliseconds, record.step) for name, value in fresh.items() if not math.isinf(value)]
        self._client.log_batch(self._run, metrics=metrics)
        self._last |= dict.fromkeys(fresh, record.step)
        return True

    def close(self, state: str) -> None:
        if self._client is not None and state in _STATES:
            self._client.set_terminated(self._run, status=_STATES[state])

    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        if found is not None:
            return found.experiment_id
        location = self._artifacts.absolute().as_uri() if self._artifacts else None
        try:
            return self._client.create_experiment(self._experiment, artifact_location=location)
        except Exception:  # another process created it
            found = self._client.get_experiment_by_name(self._experiment)
            if found is None:
                raise
            return found.experiment_id


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Each setting as a pair such as (``train.steps``, "40")."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, (value if isinstance(value, str) else json.dumps(value))[:_MOST_CHARACTERS]
