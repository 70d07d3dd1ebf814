"""Serialization of samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollout.client.buffer.sample import PayloadCorrupt, Sample, encode, parse
from rollout.trajectory.v1.trajectory_pb2 import OUTCOME_TRUNCATED, Trajectory, TrajectoryKey, VersionSpan


def made(tokens: int) -> Sample:
    ids = np.arange(tokens, dtype=np.int32)
    about = Trajectory(
        key=TrajectoryKey(run_id="r", index=7, sample=2),
        prompt_tokens=min(3, tokens),
        reward=0.5,
        metrics={"a": 1.0},
        outcome=OUTCOME_TRUNCATED,
        completion="so it ends",
        version_spans=[VersionSpan(version=4, start=0, end=tokens)],
    )
    return Sample(ids, -ids.astype(np.float32), (ids % 2).astype(np.uint8), about=about)


KEY = TrajectoryKey(run_id="r", index=7, sample=2)


@pytest.mark.parametrize("tokens", [0, 1, 31, 127, 128, 3000, 5000, 40_000])
def test_round_trip(tokens: int) -> None:
    sample = made(tokens)
    data = encode(sample, KEY)
    message = Trajectory.FromString(data)
    assert np.array_equal(np.frombuffer(message.token_ids, "<i4"), sample.token_ids)
    back = parse(data)
    for name in ("token_ids", "logprobs", "loss_mask", "raw_logprobs"):
        assert np.array_equal(getattr(back, name), getattr(sample, name)), name
    assert (back.about.reward, back.about.completion, back.about.key.index) == (0.5, "so it ends", 7)
    assert back.about.version_spans == sample.about.version_spans and back.about.metrics == sample.about.metrics
    again = encode(back, KEY)
    assert len(again) == len(data)  # a deserialized sample can be sent again


def test_strided_arrays_are_made_contiguous() -> None:
    sample = made(10_000)
    sample.token_ids = np.arange(20_000, dtype=np.int32)[::2]
    assert np.array_equal(parse(encode(sample, KEY)).token_ids, sample.token_ids)


def test_arrays_that_do_not_fit_are_refused() -> None:
    for name, value in (
        ("token_ids", np.arange(4)),
        ("logprobs", np.zeros(5, np.float32)),
        ("loss_mask", np.zeros((2, 2), np.uint8)),
    ):
        sample = made(4)
        setattr(sample, name, value)
        with pytest.raises(ValueError, match="expected"):
            encode(sample, KEY)


def test_other_bytes_are_corrupt() -> None:
    for tokens in (8, 40_000):
        data = encode(made(tokens), KEY)
        for damaged in (
            data[:-1],
            data + b"\x12",
            b"\x0b" + data,
            b"\xff" * len(data),
            Trajectory(token_ids=b"123").SerializeToString(),
        ):
            with pytest.raises(PayloadCorrupt):
                parse(damaged)


@pytest.mark.parametrize("name", ["token_ids", "logprobs", "loss_mask", "raw_logprobs"])
def test_a_list_is_refused_with_the_expected_type(name: str) -> None:
    plain: Any = {name: [1, 2, 3]}
    arrays = {"token_ids": np.arange(3, dtype=np.int32)} | plain
    with pytest.raises(ValueError, match=r"expected an array of \w+, got a list: create it with np\.array"):
        encode(Sample(**arrays), KEY)
