"""Fixtures: a small model of the addition example, and batches over its rows."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
from google.protobuf import json_format

from rollout_testing.run import Example, config
from rollout_workers.offline.process import infer

# The reward is the length of the completion. A row can name a signal to send to the worker (unless
# NO_SIGNALS is set), or make the reward fail.
REWARD = """
import os, threading

def score(samples):
    numbers = [s.row["signal"] for s in samples if "signal" in s.row]
    if numbers and "NO_SIGNALS" not in os.environ:
        os.kill(os.getppid(), numbers[0])
        threading.Event().wait()
    rewards = [float("nan") if s.row.get("fails") else float(len(s.completion)) for s in samples]
    return [{"reward": reward, "first": float(s.row["number"])} for reward, s in zip(rewards, samples)]
"""


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Example:
    return Example.prepare(tmp_path_factory.mktemp("addition"))


@dataclass(slots=True)
class Outcome:
    """The exit code of a batch and the events that it printed."""

    code: int
    events: list[dict[str, Any]]

    @property
    def last(self) -> dict[str, Any]:
        return self.events[-1]


@dataclass(slots=True)
class Bench:
    """Makes specs in a folder and runs them."""

    folder: Path
    example: Example

    def data(self, rows: int, *, fails: int | None = None, signal: tuple[int, int] | None = None) -> Path:
        """fails: the row whose reward fails. signal: the row whose reward sends a signal to the
        worker, and the signal's number."""
        path = self.folder / "data.jsonl"
        lines: list[dict[str, Any]] = [{"prompt": f"{n}+{n}=", "answer": str(2 * n), "number": n} for n in range(rows)]
        if fails is not None:
            lines[fails]["fails"] = True
        if signal is not None:
            lines[signal[0]]["signal"] = signal[1]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    def spec(self, data: Path, output: str = "out.jsonl", *, tables: dict[str, Any] | None = None, **keys: Any) -> Path:
        """tables: changes to the config. keys: changes to the spec."""
        (self.folder / "reward.py").write_text(REWARD)
        changes = {
            "sampling": {"group_size": 2},
            "reward": {"plugin": "reward.py:score", "retries": 0, "timeout_seconds": 600},
            "engine": {"slots": 16},
        }
        for name, table in (tables or {}).items():
            changes[name] = {**changes.get(name, {}), **table}
        run = config(self.example, **changes)
        spec = {
            "config": json_format.MessageToDict(run, preserving_proto_field_name=True),
            "base_dir": str(self.folder),
            "model": str(self.example.model),
            "data": str(data),
            "output": str(self.folder / output),
            "threads": 1,
            **keys,
        }
        path = self.folder / f"{output}.spec"
        path.write_text(json.dumps(spec))
        return path

    def records(self, output: str = "out.jsonl") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / output).read_text().splitlines()]


@pytest.fixture
def bench(tmp_path: Path, example: Example) -> Bench:
    return Bench(tmp_path, example)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]):
    def go(spec: Path) -> Outcome:
        capfd.readouterr()
        code = infer(str(spec))
        lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
        return Outcome(code, [json.loads(line) for line in lines])

    return go
