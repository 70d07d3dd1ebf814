"""Check that every example config fits the JSON Schema of the run config, and that invalid configs
do not.

Editors complete from this schema, so an example that it rejects is a bug in one of the two.
"""

from __future__ import annotations

import copy
import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = ROOT / "schemas" / "run_config.schema.json"
FOLDERS = ("examples", "e2e", "bench")
MANIFESTS = "examples/plugins/*/*.toml"
SUITES = "suites.toml"
"""Name of the files of `rollout eval --suite`: configs without what only training needs."""


def main() -> None:
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    validator = jsonschema.Draft7Validator(schema)
    paths = sorted({path for folder in FOLDERS for path in (ROOT / folder).rglob("*.toml")} - {*ROOT.glob(MANIFESTS)})
    if not paths:
        sys.exit(f"validate-schema: no config under {FOLDERS}")
    failed = 0
    for path in paths:
        config = tomllib.loads(path.read_text())
        errors = list(validator.iter_errors(config))
        if path.name == SUITES:
            errors = [error for error in errors if (error.json_path, error.validator) != ("$", "required")]
        problems = [f"{error.json_path}: {error.message}" for error in errors]
        missed = [name for name, broken in broken_twins(config) if validator.is_valid(broken)]
        problems += [f"the schema accepts {name}" for name in missed]
        failed += bool(problems)
        print(f"{'FAIL' if problems else 'ok  '} {path.relative_to(ROOT)}", *problems, sep="\n     ")
    print(f"{len(paths) - failed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


def broken_twins(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the config with one mistake each."""
    for name, table, key, value in (
        ("a misspelt table", None, "smapling", {}),
        ("a misspelt key", "train", "setps", 1),
        ("a wrong type", "train", "steps", "ten"),
        ("a value out of range", "train", "learning_rate", -1.0),
        ("a second algorithm", "algorithm", None, {"sft": {}, "grpo": {}}),
    ):
        broken = copy.deepcopy(config)
        if key is None:
            broken[table or ""] = value
        else:
            (broken if table is None else broken.setdefault(table, {}))[key] = value
        yield name, broken


if __name__ == "__main__":
    main()
