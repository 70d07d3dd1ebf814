"""Uses rollout-workers, and what one of its extras adds: use_workers.py [EXTRA]."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rollout.config.v1.run_config_pb2 import RunConfig
from rollout_workers.kernels.segments import CompiledSegments, segment_codec
from rollout_workers.offline.dataset import read_rows
from rollout_workers.trackers.build import facts_of, sinks_of
from rollout_workers.trackers.types import Record


def base() -> None:
    assert isinstance(segment_codec(), CompiledSegments)
    program = Path(sys.executable).with_name("rollout-worker")
    done = subprocess.run([program], capture_output=True, text=True)
    assert "rollout-worker" in done.stderr and "Traceback" not in done.stderr, done.stderr


def tracker(name: str) -> None:
    config = RunConfig(name="packages", mode="sync")
    getattr(config.sinks, name).SetInParent()
    config.sinks.wandb.mode = "offline" if name == "wandb" else ""
    config.sinks.mlflow.experiment = "packages"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sinks").mkdir()
        facts = facts_of(config, "run-01kapq3n8jz3gq5p1cs0e8q0vd", folder, folder)
        (sink,) = (made for made in sinks_of(config.sinks, facts) if made.name == name)
        sink.open()
        assert sink.write(Record("step", 1, 1_700_000_000.0, {"loss": 1.0}))
        sink.close("SUCCEEDED")
        assert any(path.is_file() for path in Path(folder).rglob("*"))


def formats() -> None:
    pyarrow = importlib.import_module("pyarrow")
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/rows.parquet"
        importlib.import_module("pyarrow.parquet").write_table(pyarrow.table({"prompt": ["1+1="]}), path)
        assert read_rows(path, 0).rows == [b'{"prompt": "1+1="}']


def hub() -> None:
    importlib.import_module("datasets")
    importlib.import_module("huggingface_hub.utils")


def adamw_8bit() -> None:
    importlib.import_module("bitsandbytes.functional").create_dynamic_map(signed=True)


USES: dict[str, Callable[[], None]] = {
    "": base,
    "tensorboard": lambda: tracker("tensorboard"),
    "wandb": lambda: tracker("wandb"),
    "mlflow": lambda: tracker("mlflow"),
    "formats": formats,
    "hub": hub,
    "adamw-8bit": adamw_8bit,
}

if __name__ == "__main__":
    USES["".join(sys.argv[1:])]()
