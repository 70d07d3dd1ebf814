"""The counting policy behind a gateway, for clients: with fixed weights, or while a run trains."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import policy
from counting import MAX_LEN
from mesh import ENDED, ROOT, Mesh, describe, until
from sim import stop

PYTHON = {"transformers": "", "vllm": ".tools/vllm/bin/python", "sglang": ".tools/sglang/bin/python"}

CONFIG = """
name = "counting"
mode = "{mode}"
deterministic = false

[model]
path = "model"
chat_template = true

[data]
train = "train.jsonl"

[sampling]
group_size = 2
max_tokens = 1

{samples}

[algorithm.grpo]

[train]
steps = 100000
groups_per_step = 1
learning_rate = 1e-3

[engine]
kind = "{engine}"
python = "{python}"
slots = 32
max_model_len = {max_len}

[staleness]
max_steps = {staleness}

[snapshot]
every_steps = 0

[limits]
worker_start_seconds = 1800
"""
FIXED = '[environment]\nkind = "external"'
TRAINED = '[reward]\nplugin = "reward.py:nothing"'


@dataclass(frozen=True)
class Served:
    """A policy that is served."""

    url: str
    key: str
    model: str
    folder: Path
    running: Mesh
    run: str

    def ready(self) -> None:
        """Wait until a worker serves the policy."""

        def serves() -> bool:
            status = self.running.status(self.run)
            assert status.run.state not in ENDED, describe(status)
            listed = httpx.get(f"{self.url}/v1/models", headers={"authorization": f"Bearer {self.key}"}, timeout=60)
            return self.model in [model["id"] for model in listed.json()["data"]]

        until(serves, "a worker", 1800)

    def version(self) -> int:
        """The newest weights version of the run."""
        return self.running.status(self.run).run.step


def write(folder: Path, engine: str, *, changing: bool) -> Path:
    """Write the run's files, and return its config."""
    folder.mkdir(parents=True)
    policy.write(folder / "model")
    (folder / "train.jsonl").write_text("".join(json.dumps({"prompt": f"{n}"}) + "\n" for n in range(64)))
    (folder / "reward.py").write_text("def nothing(samples):\n    return [0.0 for _ in samples]\n")
    python = PYTHON[engine] and str(ROOT / PYTHON[engine])
    config = folder / "counting.toml"
    config.write_text(
        CONFIG.format(
            mode="async" if changing else "sync",
            samples=TRAINED if changing else FIXED,
            engine=engine,
            python=python,
            max_len=MAX_LEN,
            staleness=8 if changing else 0,
        )
    )
    return config


@contextlib.contextmanager
def served(folder: Path, engine: str, *, seconds: float = 0) -> Iterator[Served]:
    """Serve the policy. seconds: between two weights versions; 0: the weights stay."""
    config = write(folder / "job", engine, changing=seconds > 0)
    worker = str(Path(__file__).with_name("worker.py"))
    running = Mesh(
        folder / "state",
        arguments=("--worker-command", f"{sys.executable} {worker}", "--worker-python", sys.executable),
        environment={"PYTHONPATH": f"{ROOT / 'python'}:{Path(__file__).parent}", "COUNTING_SECONDS": str(seconds)},
    )
    running.state.mkdir()
    try:
        running.start()
        run = running.submit(config)
        yield Served(str(running.daemon()["gateway"]), running.token(), "counting", config.parent / "model", running, run)
        assert running.status(run).run.state not in ENDED, describe(running.status(run))
        running.stop()
    finally:
        stop(running)
