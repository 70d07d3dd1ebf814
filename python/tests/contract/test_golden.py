"""The vectors of ``schemas/golden/contracts.json``; ``proto/golden_test.go`` checks the same."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format, symbol_database

VECTORS: list[dict[str, Any]] = json.loads((Path(__file__).parents[3] / "schemas/golden/contracts.json").read_text())


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_json_and_wire_are_the_same_message(vector: dict[str, Any]) -> None:
    package, version, _ = vector["message"].split(".")[1:]
    importlib.import_module(f"rollout.{package}.{version}.{package}_pb2")
    make = symbol_database.Default().GetSymbol(vector["message"])
    message = json_format.ParseDict(vector["json"], make())
    assert message.SerializeToString(deterministic=True).hex() == vector["wire"]
    assert make.FromString(bytes.fromhex(vector["wire"])) == message
