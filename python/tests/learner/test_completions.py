"""Which samples of a step are stored for inspection, and their fields."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from rollout.config.v1.run_config_pb2 import RunConfig
from rollout.trajectory.v1.trajectory_pb2 import Turn, VersionSpan
from rollout_workers.learner.completions import MOST_CHARACTERS, Keep, keep_of
from rollout_workers.learner.payload import PARTS
from rollout_workers.trainer.types import TrainSample


def sample(index: int, place: int, *, prompt: str = "1+1=", completion: str = "2", reward: float = 1.0) -> TrainSample:
    ids = np.arange(6, dtype=np.int32)
    return TrainSample(
        group_key=f"{0:010d}/{index:020d}",
        sample=place * PARTS,
        token_ids=ids,
        prompt_length=4,
        loss_mask=np.array([0, 0, 0, 0, 1, 1], np.uint8),
        logprobs=np.zeros(6, np.float32),
        reward=reward,
        prompt=prompt,
        completion=completion,
    )


def test_stores_the_completions_of_the_first_prompts_with_their_advantages() -> None:
    samples = [sample(7, 1, reward=0.5), sample(9, 0), sample(7, 0)]
    advantages = {(samples[0].group_key, samples[0].sample): -0.25}
    kept = Keep(per_step=2, every_steps=1).of(3, samples, advantages)
    assert [(c.epoch, c.index, c.sample, c.reward, c.tokens) for c in kept] == [(0, 7, 0, 1.0, 2), (0, 7, 1, 0.5, 2)]
    assert not kept[0].HasField("advantage") and kept[1].advantage == -0.25


def test_the_number_of_steps_and_the_length_of_texts_are_limited() -> None:
    keep = Keep(per_step=64, every_steps=10)
    assert [step for step in range(1, 31) if keep.of(step, [sample(0, 0)], {})] == [1, 11, 21]
    assert Keep(per_step=0, every_steps=1).of(1, [sample(0, 0)], {}) == []
    long = [sample(i, 0, prompt="ä" * 20_000 + "?", completion="b" * 20_000) for i in range(80)]
    kept = keep.of(1, long, {})
    assert len(kept) == 64 and kept[0].prompt.endswith("ä?") and kept[0].completion.endswith("…")
    assert len(json.dumps([[c.prompt, c.completion] for c in kept], ensure_ascii=False)) < 110_000  # the maximum size of an event
    [one] = Keep(per_step=1, every_steps=1).of(1, long, {})
    assert len(one.completion) == MOST_CHARACTERS


def test_an_episode_keeps_its_turns_and_tokens() -> None:
    call = {"role": "assistant", "content": "x" * 9000, "tool_calls": [{"function": {"name": "add", "arguments": "y" * 9000}}]}
    turns = [Turn(start=0, end=4, text="p" * 9000), Turn(sampled=True, start=4, end=6, messages=[json.dumps(call)], reward=0.5)]
    one = replace(sample(0, 0), turns=turns * 300, spans=[VersionSpan(version=3, end=2)], metrics={"m": 1.0})
    [kept] = Keep(per_step=1, every_steps=1).of(1, [one], {})
    assert (kept.token_ids, kept.logprobs, kept.loss_mask) == (one.token_ids[4:].tobytes(), bytes(8), b"\1\1")
    assert (len(kept.turns), kept.turns[1].reward, kept.version_spans[0].version, dict(kept.metrics)) == (128, 0.5, 3, {"m": 1.0})
    message = json.loads(kept.turns[1].messages[0])
    assert message["content"].endswith("x…") and message["tool_calls"][0]["function"]["arguments"].endswith("y…")
    assert len(kept.SerializeToString()) < 20_000


@pytest.mark.parametrize(
    ("kind", "kept"), [("grpo", True), ("ppo", True), ("distillation", True), ("sft", False), ("dpo", False)]
)
def test_runs_that_train_on_data_store_no_completions(kind: str, kept: bool) -> None:
    config = RunConfig()
    getattr(config.algorithm, kind).SetInParent()
    config.completions.per_step = 4
    assert (keep_of(config) is not None) == kept
