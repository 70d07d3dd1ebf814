"""The traits of the algorithms, compared with what the trainer's algorithms need."""

from __future__ import annotations

import pytest

from rollout.algorithm import samples, traits
from rollout_workers.algorithms import build_algorithm
from rollout_workers.algorithms.registry import BUILDERS, config_type


@pytest.mark.parametrize("name", BUILDERS)
def test_the_traits_match_the_needs_of_the_trainer(name: str) -> None:
    needs = build_algorithm(name, config_type(name)()).needs
    assert (needs.sampled, needs.critic, needs.score_head, needs.group_rewards) == (
        samples(name),
        traits(name).needs_critic,
        traits(name).scores,
        traits(name).compares_group,
    )
