"""Lookup of algorithms by name."""

from __future__ import annotations

import pytest
import torch

from rollout_workers.algorithms import GrpoConfig, SftConfig, TokenBatch, UnknownAlgorithm, build_algorithm


def test_sft_is_the_mean_negative_log_likelihood_over_all_tokens_of_the_batch() -> None:
    algorithm = build_algorithm("sft", SftConfig())
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    loss = algorithm.loss(TokenBatch(logprobs=logprobs, normalizer=12.0)).loss
    loss.backward()
    assert loss.item() == 0.5
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx([-1 / 12] * 3)
    assert algorithm.advantages is None and not algorithm.needs.sampled


def test_settings_are_bound() -> None:
    algorithm = build_algorithm("grpo", GrpoConfig(normalize_std=False))
    assert algorithm.advantages is not None
    assert algorithm.advantages(torch.tensor([0.0, 4.0]).double(), torch.tensor([0, 0])).tolist() == [-2.0, 2.0]


def test_an_unknown_name_suggests_and_lists() -> None:
    with pytest.raises(
        UnknownAlgorithm, match=r"no algorithm 'grop'; did you mean 'grpo'\? There are: sft, reward_model, ppo, grpo"
    ):
        build_algorithm("grop")


def test_settings_of_another_algorithm_are_refused() -> None:
    with pytest.raises(TypeError, match="takes SftConfig, not GrpoConfig"):
        build_algorithm("sft", GrpoConfig())
