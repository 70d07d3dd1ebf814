"""Composite rewards, and rewards of parts of a completion."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollout.algorithm import traits
from rollout.config.v1.run_config_pb2 import RewardConfig
from rollout.environment import Result, Task, Turn
from rollout.plugin import RewardFailed, Score, Step
from rollout_workers.algorithms import build_algorithm
from rollout_workers.algorithms.registry import BUILDERS
from rollout_workers.data.prompts import PromptReader, Text
from rollout_workers.environments.single_turn import SingleTurn
from rollout_workers.rewards.composite import Composite, Part
from rollout_workers.rewards.config import scorer_of
from rollout_workers.rewards.process_reward import spread
from rollout_workers.rewards.rewards import RewardGroup, Rewards, Scorable

GROUP = RewardGroup(json.dumps({"answer": "42"}).encode(), (Scorable("17+25=", "42"), Scorable("17+25=", "4")))


class Fixed:
    """A source with one score for every sample, which fails for completions with a certain text."""

    def __init__(self, score: Score, fails_for: str | None = None) -> None:
        self.score, self.fails_for, self.calls = score, fails_for, 0

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def call(self, groups: Sequence[RewardGroup], timeout: float) -> list[Score]:
        self.calls += 1
        samples = [sample for group in groups for sample in group.samples]
        if any(sample.completion == self.fails_for for sample in samples):
            raise RewardFailed("no")
        return [self.score] * len(samples)


def part(name: str, weight: float, score: Score, fails_for: str | None = None) -> Part:
    return Part(name, weight, Rewards(Fixed(score, fails_for), timeout_seconds=1, retries=1))


async def test_the_reward_is_a_weighted_sum_and_each_part_is_a_metric() -> None:
    composite = Composite([part("format", 0.5, Score(1.0, {"length": 2.0})), part("right", 2.0, Score(-1.0))])
    [results] = await composite.score([GROUP])
    assert results == [Result(-1.5, {"reward/format": 1.0, "format/length": 2.0, "reward/right": -1.0})] * 2


async def test_a_failing_part_fails_the_sample() -> None:
    composite = Composite([part("format", 1.0, Score(1.0)), part("right", 1.0, Score(1.0), fails_for="bad")])
    bad = RewardGroup(GROUP.row_json, (Scorable("17+25=", "bad"),))
    [good, failing] = await composite.score([GROUP, bad])
    assert [result.reward for result in good] == [2.0, 2.0]
    assert [(result.outcome, result.reason, result.reward) for result in failing] == [("infra_failed", "REWARD_RAISED", 0.0)]
    assert (composite.failures, composite.retries) == (1, 3)  # each group is scored alone, the failing one twice


async def test_a_sum_that_overflows_is_no_reward() -> None:
    composite = Composite([part("format", 1e6, Score(9e17)), part("right", 1.0, Score(1.0))])
    [results] = await composite.score([GROUP])
    assert [(result.outcome, result.reason) for result in results] == [("infra_failed", "REWARD_BAD_RESULT")] * 2


async def test_the_config_selects_the_scorer(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def length(samples): return [float(len(s.completion)) for s in samples]\n")
    config = RewardConfig(timeout_seconds=20, retries=0)
    config.composite["right"].weight = 1.0
    config.composite["right"].expression = "completion == row.answer"
    config.composite["length"].weight = 0.25
    config.composite["length"].plugin = "reward.py:length"
    scorer = scorer_of(config, str(tmp_path), lambda number: Fixed(Score(1.0)))
    await scorer.start()
    [results] = await scorer.score([GROUP])
    assert [result.reward for result in results] == [1.5, 0.25]
    assert results[0].metrics == {"reward/length": 2.0, "reward/right": 1.0}
    await scorer.close()


def test_the_reward_of_a_step_is_at_the_token_that_completes_it() -> None:
    pieces = ["3*", "4 ", "=", " 12", ";"]
    text = "".join(pieces)
    steps = [Step(0, 3, 0.5), Step(3, 8, 1.0), Step(8, 9, -1.0)]
    assert spread(steps, 5, lambda n: "".join(pieces[:n])) == (0.0, 0.5, 0.0, 1.0, -1.0)
    assert sum(spread([Step(0, len(text), 2.0)], 5, lambda n: "".join(pieces[:n]))) == 2.0
    assert spread([Step(0, 1, 1.0)], 0, lambda n: "") == ()


async def test_step_rewards_become_token_rewards(text: Text) -> None:
    prompts = PromptReader(text, prompt_field="prompt", chat_template=False)
    score = Score(1.0, token_rewards=(0.5, 0.25), steps=(Step(1, 2, 4.0),))
    ids = text.encode(["42"])[0]
    turn = Turn(Task("k", GROUP.row_json, (0,), (1,)), 0, 0, "17+25=", ids, "42", False)
    assert len(ids) == 2
    environment = SingleTurn(prompts, Composite([part("steps", 2.0, score)]), text)
    [result] = await environment.step([turn])
    assert isinstance(result, Result)
    assert (result.reward, result.token_rewards, result.metrics["reward/parts"]) == (2.0, (1.0, 8.5), 9.5)
    refusing = SingleTurn(prompts, Composite([part("steps", 2.0, score)]), text, takes_token_rewards=False)
    [result] = await refusing.step([turn])
    assert isinstance(result, Result) and (result.outcome, result.reason) == ("infra_failed", "REWARD_BAD_RESULT")


async def test_without_a_reward_every_sample_gets_0(text: Text) -> None:
    environment = SingleTurn(PromptReader(text, prompt_field="prompt", chat_template=False), None, text)
    turn = Turn(Task("k", GROUP.row_json, (0,), (1,)), 0, 0, "17+25=", text.encode(["42"])[0], "42", False)
    assert await environment.step([turn, turn]) == [Result(), Result()]


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_algorithms_agree_on_the_support_of_token_rewards(name: str) -> None:
    torch = pytest.importorskip("torch")
    from rollout_workers.algorithms import EstimatorBatch

    algorithm = build_algorithm(name)
    if algorithm.estimate is None:
        assert not traits(name).token_rewards
        return
    zeros = torch.zeros(4, dtype=torch.float64)
    found = algorithm.estimate(
        EstimatorBatch(
            rewards=torch.zeros(2, dtype=torch.float64),
            groups=torch.tensor([0, 0]),
            sample=torch.tensor([0, 0, 1, 1]),
            token_rewards=torch.tensor([1.0, -1.0, 0.0, 0.5], dtype=torch.float64),
            logprobs=zeros,
            reference_logprobs=zeros,
            values=zeros,
        )
    ).advantages
    differs = bool(found[0] != found[1])
    assert differs or not traits(name).token_rewards
