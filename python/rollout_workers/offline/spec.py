"""The spec of a batch: one JSON object in a file.

    {"config": RunConfig, "base_dir": "/jobs", "model": "/models/tiny", "weights_digest": "", "data": "/data/test.jsonl",
     "subset": "", "split": "test", "output": "/out/test.parquet", "limit": 0, "threads": 2, "restart": false,
     "allow_failures": false, "baseline": "", "cluster": "", "scores": "", "library": null}

``config`` has the prompt field, template, sampling (``sampling.group_size`` completions per row),
seed, reward, and engine. Relative paths in it start at ``base_dir``. ``weights_digest``: the
required digest of the loaded weights; "" accepts any. ``library``: of a suite whose tasks are those
of a library, what ``rollout.suites.types.Request`` has of it, and ``python``; without ``url`` the
worker says which weights these are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from rollout.config.v1.run_config_pb2 import RunConfig
from rollout_workers.engines.registry import entry
from rollout_workers.offline.errors import SpecInvalid


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """Paths are absolute. model and data may be names on the hub, and data may be anything that
    ``data.eval`` may be. limit: number of rows from the start of the dataset, 0 for all. threads:
    number of torch threads, which can change the low bits of results."""

    config: RunConfig
    base_dir: str
    model: str
    weights_digest: str
    data: str
    subset: str
    split: str
    output: str
    limit: int
    threads: int
    restart: bool
    allow_failures: bool
    baseline: str = ""
    cluster: str = ""
    scores: str = ""
    library: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def parquet(self) -> bool:
        return self.output.endswith(".parquet")

    @property
    def journal(self) -> str:
        return self.output + ".journal"

    @property
    def samples(self) -> int:
        return max(1, self.config.sampling.group_size)


def load_spec(path: str) -> BatchSpec:
    """Raises :class:`SpecInvalid`."""
    try:
        given = json.loads(Path(path).read_bytes())
        config = json_format.ParseDict(given["config"], RunConfig(), ignore_unknown_fields=True)
        # if the engine can, completions do not depend on the rest of their batch
        config.mode, config.deterministic = "sync", entry(config.engine.kind).capabilities.deterministic
        config.model.path = given["model"]
        config.ClearField("lora")  # the folder has whole weights
        return BatchSpec(
            config=config,
            base_dir=given["base_dir"],
            model=given["model"],
            weights_digest=given.get("weights_digest", ""),
            data=given["data"],
            subset=given.get("subset", ""),
            split=given.get("split") or "test",
            output=given["output"],
            limit=int(given.get("limit", 0)),
            threads=int(given.get("threads", 0)) or os.cpu_count() or 1,
            restart=bool(given.get("restart", False)),
            allow_failures=bool(given.get("allow_failures", False)),
            baseline=given.get("baseline", ""),
            cluster=given.get("cluster", ""),
            scores=given.get("scores", ""),
            library=given.get("library") or {},
        )
    except (OSError, ValueError, KeyError, json_format.ParseError) as error:
        raise SpecInvalid(f"can't read {path or 'the spec'}: {error}") from error
