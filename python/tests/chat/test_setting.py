"""``model.chat_family`` of a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollout.config.v1.run_config_pb2 import RunConfig
from rollout_workers.chat.families import FAMILIES
from rollout_workers.inference import worker

SCHEMA = Path(__file__).parents[3] / "schemas" / "run_config.schema.json"


def test_the_configuration_accepts_the_families() -> None:
    definitions = json.dumps(json.loads(SCHEMA.read_text()))
    names = list(dict.fromkeys(family.name for family in FAMILIES))
    assert f'"enum": {json.dumps(names)}' in definitions


@pytest.mark.parametrize("family", ["", "hermes"])
def test_the_worker_parses_chats_as_configured(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(worker, "Generation", lambda *_, family: made.append(family))
    config = RunConfig()
    config.engine.max_model_len = 8
    if family:
        config.model.chat_family = family
    parts: Any = SimpleNamespace(
        config=config,
        model=SimpleNamespace(engine=None, text=None),
        who=None,
        receipts=None,
        throughput=None,
        params=None,
        puller=None,
        consumer=None,
    )
    worker._servicer(cast(Any, None), parts, parts, *cast(Any, [None] * 5), {})
    assert made == [family]
