from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest

from rollout_workers.multistep import MultiStepRolloutWorker, Peer, SettingsInvalid, mapped_ranks
from rollout_workers.multistep.settings import read_settings

from .worlds import config

PROBLEMS = [
    ({"algorithm__gamma": None}, "algorithm.gamma is missing"),
    ({"algorithm__gamma": 1.5}, "algorithm.gamma: 1.5 is not a number from 0 to 1"),
    ({"algorithm__gamma": True}, "algorithm.gamma: True is not a number from 0 to 1"),
    ({"algorithm__bootstrap_type": 3}, "algorithm.bootstrap_type: 3 is not a text"),
    ({"env__train__auto_reset": "yes"}, "env.train.auto_reset: 'yes' is not true or false"),
    ({"env__train__total_num_envs": 0}, "env.train.total_num_envs: 0 is not a positive integer"),
    ({"env__train__total_num_envs": None}, "env.train.total_num_envs is missing"),
    (
        {"env__train__total_num_envs": 5},
        "env.train.total_num_envs: 5 is not a multiple of 2 (env.world_size times pipeline stages)",
    ),
    (
        {"env__eval__total_num_envs": 3},
        "env.eval.total_num_envs: 3 is not a multiple of 2 (env.world_size times pipeline stages)",
    ),
    (
        {"env__train__max_steps_per_rollout_epoch": 7},
        "env.train.max_steps_per_rollout_epoch: 7 is not a multiple of 2 (actor.model.num_action_chunks)",
    ),
    (
        {"rollout__pipeline_stage_num": 3},
        "env.train.total_num_envs: 4 is not a multiple of 3 (WORLD_SIZE times pipeline stages)",
    ),
    ({"rollout__rank": -1}, "rollout.rank: -1 is not an integer of at least 0"),
    ({"rollout__rank": 1}, "rank 1 is not below the world size 1"),
    ({"rollout__receive_timeout_seconds": 0}, "rollout.receive_timeout_seconds: 0 is not a positive number of seconds"),
    ({"actor": None}, "actor.model.num_action_chunks is missing"),
]


@pytest.mark.parametrize(("changes", "problem"), PROBLEMS, ids=[problem for _, problem in PROBLEMS])
def test_a_wrong_key_is_named_with_its_value(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingsInvalid) as caught:
        MultiStepRolloutWorker(config(**changes))
    assert problem in str(caught.value).split("; ")
    assert caught.value.fix


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(SettingsInvalid) as caught:
        MultiStepRolloutWorker({"rollout": {"device": 1}})
    assert caught.value.message.split("; ") == [
        "actor.model.num_action_chunks is missing",
        "env.train.total_num_envs is missing",
        "env.train.auto_reset is missing",
        "algorithm.gamma is missing",
        "rollout.device: 1 is not a text",
    ]


def test_a_config_must_be_a_mapping() -> None:
    with pytest.raises(SettingsInvalid, match="cfg is a list, not a mapping"):
        MultiStepRolloutWorker([])  # type: ignore[arg-type]


def test_the_rank_is_of_the_config_or_else_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    settings = MultiStepRolloutWorker(config(rollout=None, env__eval=None)).settings
    assert (settings.rank, settings.world_size) == (1, 4)
    settings = read_settings(config())
    assert (settings.rank, settings.world_size) == (0, 1)
    settings = read_settings(config(rollout=None), {})
    assert (settings.rank, settings.world_size) == (0, 1)


@pytest.mark.parametrize(("name", "value", "least"), [("RANK", "-1", 0), ("RANK", "one", 0), ("WORLD_SIZE", "0", 1)])
def test_a_wrong_variable_is_named(name: str, value: str, least: int) -> None:
    with pytest.raises(SettingsInvalid, match=f"^{name}={value} is not an integer of at least {least};"):
        read_settings(config(rollout=None), {name: value})


def test_any_mapping_is_a_config_and_other_keys_are_ignored() -> None:
    cfg = OrderedDict(config(), cluster={"num_nodes": 1})
    settings = read_settings(cfg)
    assert settings.peers == {"train": (Peer(0, 2), Peer(1, 2)), "eval": (Peer(0, 1), Peer(1, 1))}
    assert settings.chunk == 2
    assert "eval" not in read_settings(config(env__eval=None)).peers


@pytest.mark.parametrize(("ours", "theirs"), [(1, 1), (1, 4), (4, 1), (2, 3), (3, 2), (4, 6), (6, 4)])
def test_ranks_are_mapped_so_that_each_row_has_one_place(ours: int, theirs: int) -> None:
    rows = 24
    sent = {
        (rank, peer.rank): peer.rows
        for rank in range(ours)
        for peer in mapped_ranks(rows, world_size=ours, peers=theirs, rank=rank)
    }
    back = {
        (peer.rank, rank): peer.rows
        for rank in range(theirs)
        for peer in mapped_ranks(rows, world_size=theirs, peers=ours, rank=rank)
    }
    assert sent == back
    assert sum(sent.values()) == rows
    owner = [(row * ours // rows, row * theirs // rows) for row in range(rows)]
    assert sent == {pair: owner.count(pair) for pair in owner}


@pytest.mark.parametrize(("rows", "rank"), [(5, 0), (0, 0), (6, 2), (6, -1)])
def test_ranks_that_cannot_be_mapped_are_refused(rows: int, rank: int) -> None:
    with pytest.raises(ValueError):
        mapped_ranks(rows, world_size=2, peers=3, rank=rank)
