"""The trainer's settings agree with the config contract."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from typing import Any

import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor

from buf.validate import validate_pb2
from rollout.algorithm import keys_of as keys_of_table
from rollout.algorithm import table_of, traits
from rollout.config.v1 import options_pb2
from rollout.config.v1.algorithm_pb2 import AlgorithmConfig
from rollout.config.v1.run_config_pb2 import RunConfig
from rollout_workers.algorithms import build_algorithm
from rollout_workers.algorithms.registry import BUILDERS
from rollout_workers.learner.settings import algorithm_settings

# Fields of dataclasses that are not keys of their table: they come from another table or another
# key.
OF_THE_RUN = {"off_policy", "max_tokens"}
NOT_EVERYWHERE = {"normalize_std"}  # not in every table
# Required keys, which have no default.
REQUIRED = {"teacher"}
OF_THE_WORKERS = {"endpoint"}  # keys that the learner does not use
NEEDED = {"critic_warmup_steps": {"critic": "network"}}
"""What a key needs that is set to another value than its default."""


def keys_of(name: str) -> list[FieldDescriptor]:
    """The keys of an algorithm's table that the learner uses."""
    return [field for field in keys_of_table(table_of(name)) if field.name not in OF_THE_WORKERS]


def table(name: str) -> dict[str, Any]:
    """The learner's keys with the defaults of the contract."""
    return {field.name: default_of(name, field) for field in keys_of(name)}


def default_of(name: str, field: FieldDescriptor) -> Any:
    """The default in the contract; ``x`` without one."""
    default = traits(name).defaults.get(field.name) or field.GetOptions().Extensions[options_pb2.meta].default
    return tomllib.loads(f"v = {default}")["v"] if default else "x"


def run_config(mode: str, name: str, given: dict[str, Any], **tables: Any) -> RunConfig:
    """A config with keys of an algorithm's table, each in the message that declares it."""
    fields = table_of(name).fields
    holder = {inner.name: field.name for field in fields if field.message_type for inner in field.message_type.fields}
    nested: dict[str, Any] = {}
    for key, value in given.items():
        (nested.setdefault(holder[key], {}) if key in holder else nested)[key] = value
    return json_format.ParseDict({"mode": mode, **tables, "algorithm": {name: nested}}, RunConfig())


def other_value(name: str, field: FieldDescriptor) -> Any:
    """A valid value that is not the default. Numbers are different for each key of a table."""
    default = default_of(name, field)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return not default
    if field.type == FieldDescriptor.TYPE_UINT32:
        return default + field.number
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return (2.0 if field.name == "dual_clip" else 0.75 * default) + field.number / 1024
    assert field.type == FieldDescriptor.TYPE_STRING, f"{field.name}: say here what else it may be"
    choices = field.GetOptions().Extensions[validate_pb2.field].string
    return next((choice for choice in getattr(choices, "in") if choice != default), "y")


def test_the_contract_and_the_registry_name_the_same_algorithms() -> None:
    assert {field.name for field in AlgorithmConfig.DESCRIPTOR.fields} == set(BUILDERS)


@pytest.mark.parametrize("name", BUILDERS)
def test_every_key_has_a_setting_with_the_same_default(name: str) -> None:
    settings = {field.name: field.default for field in fields(BUILDERS[name][0])}
    keys = table(name)
    assert {key: value for key, value in keys.items() if key not in REQUIRED} == {
        key: settings[key] for key in keys if key not in REQUIRED
    }
    assert set(settings) - set(keys) <= OF_THE_RUN | NOT_EVERYWHERE


@pytest.mark.parametrize("name", BUILDERS)
def test_every_value_of_the_plan_reaches_the_algorithm(name: str) -> None:
    """Sets one key at a time to a value that is not the default, in a table with defaults."""
    kind, run = BUILDERS[name][0], {"off_policy": True, "max_tokens": 77}
    of_the_run = {key: value for key, value in run.items() if key in {field.name for field in fields(kind)}}
    for field in keys_of(name):
        given = {**table(name), **NEEDED.get(field.name, {}), field.name: other_value(name, field)}
        config = run_config("async", name, given, sampling={"max_tokens": 77})
        settings = algorithm_settings(config)
        assert type(settings) is kind
        assert settings == kind(**given, **of_the_run), field.name
        assert getattr(settings, field.name) == given[field.name] != table(name)[field.name]
        assert build_algorithm(name, settings).name == name


@pytest.mark.parametrize("name", BUILDERS)
def test_every_key_can_be_set_alone(name: str) -> None:
    """Like a plan that was made before the other keys existed."""
    kind = BUILDERS[name][0]
    for field in keys_of(name):
        given = {**NEEDED.get(field.name, {}), field.name: other_value(name, field)}
        needed = {"sampling": {"max_tokens": 77}} if "max_tokens" in {field.name for field in fields(kind)} else {}
        config = run_config("sync", name, given, **needed)
        assert algorithm_settings(config) == kind(**given, **({"max_tokens": 77} if needed else {})), field.name


def test_the_teachers_path_is_relative_to_the_config() -> None:
    given = {"mode": "sync", "algorithm": {"distillation": {"teacher": "models/big"}}}
    config = json_format.ParseDict(given, RunConfig())
    assert algorithm_settings(config, "/runs").teacher == "/runs/models/big"


def test_the_learner_does_not_load_a_teacher_behind_an_endpoint() -> None:
    given = {"mode": "sync", "algorithm": {"distillation": {"endpoint": {"base_url": "http://h/v1", "model": "t"}}}}
    assert algorithm_settings(json_format.ParseDict(given, RunConfig()), "/runs").teacher == ""


@pytest.mark.parametrize(
    ("mode", "deterministic", "corrected"),
    [("sync", None, False), ("sync", True, False), ("sync", False, True), ("async", None, True)],
)
def test_the_engine_is_corrected_for_unless_bits_are_promised(mode: str, deterministic: bool | None, corrected: bool) -> None:
    config = run_config(mode, "grpo", {})
    if deterministic is not None:
        config.deterministic = deterministic
    assert algorithm_settings(config).off_policy is corrected


def test_a_plan_from_before_a_key_existed_keeps_its_meaning() -> None:
    config = run_config("sync", "grpo", {"clip_low": 0.1, "normalize_std": False})
    settings = algorithm_settings(config)
    assert (settings.clip_low, settings.reduction, settings.normalization, settings.off_policy) == (0.1, "token", "none", False)
