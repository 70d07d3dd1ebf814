"""The classes of packages without their package: each message names the command that installs
it."""

from __future__ import annotations

import json
import sys

import pytest

from rollout.environments import ArgumentInvalid, PackageMissing, source
from rollout.hosting.episodes import load_environment

ARGS = {"gymnasium": {"id": "FrozenLake-v1"}, "reasoning_gym": {"dataset": "basic_arithmetic"}, "verifiers": {"id": "wordle"}}


@pytest.mark.parametrize("kind", list(ARGS))
def test_a_missing_package_names_the_command_that_installs_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, kind, None)
    loaded = source(kind, "", ".", json.dumps(ARGS[kind]))
    with pytest.raises(PackageMissing) as missing:
        load_environment(loaded["plugin"], loaded["base_dir"], json.loads(loaded["args"]))
    assert str(missing.value) == (
        f'`environment.kind = "{kind}"`: import of {kind} halted; None in sys.modules; '
        f"run `rollout plugin install {kind}`, and set `environment.python` to the interpreter that it prints"
    )


@pytest.mark.parametrize(
    ("path", "args", "message"),
    [
        ("", {}, "the environment of verifiers has no name"),
        ("game.py:load_environment", {"id": "wordle"}, "`id` and `environment.path` name two environments"),
    ],
)
def test_an_environment_of_verifiers_has_one_name(path: str, args: dict[str, str], message: str) -> None:
    loaded = source("verifiers", path, "/configs", json.dumps(args))
    with pytest.raises(ArgumentInvalid, match=message):
        load_environment(loaded["plugin"], loaded["base_dir"], json.loads(loaded["args"]))
