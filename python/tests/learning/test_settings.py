"""The trainer's settings against the contract."""

from __future__ import annotations

import tomllib
from dataclasses import fields

import pytest
from google.protobuf import json_format

from rollout.config.v1 import options_pb2
from rollout.config.v1.run_config_pb2 import AlgorithmConfig, RunConfig
from rollout_workers.algorithms import build_algorithm
from rollout_workers.algorithms.registry import BUILDERS
from rollout_workers.learning.settings import algorithm_settings

# What a dataclass has beside the keys of its table: from elsewhere in the run config, or set by another key.
OF_THE_RUN = {"off_policy", "max_tokens"}
NOT_EVERYWHERE = {"normalize_std", "dual_clip", "kl_target", "kl_horizon"}  # not every table offers them
# What has no default: the config must say it.
REQUIRED = {"teacher"}
OF_THE_WORKERS = {"endpoint"}  # keys that the learner has no use for


def table(name: str) -> dict[str, object]:
    """The keys of an algorithm's table with the defaults of the contract."""
    message = AlgorithmConfig.DESCRIPTOR.fields_by_name[name].message_type
    values: dict[str, object] = {}
    for field in message.fields:
        if field.name in OF_THE_WORKERS:
            continue
        default = field.GetOptions().Extensions[options_pb2.meta].default
        values[field.name] = tomllib.loads(f"v = {default}")["v"] if default else "x"
    return values


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
def test_what_the_plan_sets_reaches_the_algorithm(name: str) -> None:
    config = json_format.ParseDict(
        {"mode": "async", "sampling": {"max_tokens": 77}, "algorithm": {name: table(name)}}, RunConfig()
    )
    settings = algorithm_settings(config)
    assert type(settings) is BUILDERS[name][0]
    assert {key: getattr(settings, key) for key in table(name)} == table(name)
    assert getattr(settings, "off_policy", True)
    assert getattr(settings, "max_tokens", 77) == 77
    assert build_algorithm(name, settings).name == name


def test_the_teacher_is_looked_for_beside_the_config() -> None:
    given = {"mode": "sync", "algorithm": {"distillation": {"teacher": "models/big"}}}
    config = json_format.ParseDict(given, RunConfig())
    assert algorithm_settings(config, "/runs").teacher == "/runs/models/big"


def test_a_teacher_behind_an_endpoint_is_not_the_learners() -> None:
    given = {"mode": "sync", "algorithm": {"distillation": {"endpoint": {"base_url": "http://h/v1", "model": "t"}}}}
    assert algorithm_settings(json_format.ParseDict(given, RunConfig()), "/runs").teacher == ""


def test_a_plan_from_before_a_key_existed_keeps_its_meaning() -> None:
    config = json_format.ParseDict(
        {"mode": "sync", "algorithm": {"grpo": {"clip_low": 0.1, "normalize_std": False}}}, RunConfig()
    )
    settings = algorithm_settings(config)
    assert (settings.clip_low, settings.reduction, settings.normalization, settings.off_policy) == (0.1, "token", "none", False)
