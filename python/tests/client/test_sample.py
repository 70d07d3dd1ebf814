"""Samples as bytes and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollout.client.buffer.sample import PayloadCorrupt, Piece, Sample, parse, pieces, told
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


def put(sample: Sample) -> list[Piece]:
    """What a put makes of it."""
    key = Trajectory(key=TrajectoryKey(run_id="r", index=7, sample=2)).SerializeToString()
    return pieces(sample, key + told(sample.about))


@pytest.mark.parametrize("tokens", [0, 1, 31, 127, 128, 3000, 5000, 40_000])
def test_round_trip(tokens: int) -> None:
    sample = made(tokens)
    data = b"".join(put(sample))
    message = Trajectory.FromString(data)  # it is the contract's message, whatever the size
    assert np.array_equal(np.frombuffer(message.token_ids, "<i4"), sample.token_ids)
    back = parse(memoryview(data))
    for name in ("token_ids", "logprobs", "loss_mask", "raw_logprobs"):
        assert np.array_equal(getattr(back, name), getattr(sample, name)), name
    assert (back.about.reward, back.about.completion, back.about.key.index) == (0.5, "so it ends", 7)
    assert back.about.version_spans == sample.about.version_spans and back.about.metrics == sample.about.metrics
    again = b"".join(put(back))
    assert len(again) == len(data)  # what was read can be put


def test_large_arrays_are_not_copied() -> None:
    sample = made(40_000)
    address = sample.token_ids.__array_interface__["data"][0]
    views = [np.frombuffer(piece, np.uint8) for piece in put(sample) if len(piece) == sample.token_ids.nbytes]
    assert views[0].__array_interface__["data"][0] == address
    data = b"".join(put(sample))
    assert np.shares_memory(parse(memoryview(data)).token_ids, np.frombuffer(data, np.uint8))


@pytest.mark.parametrize("tokens", [0, 3, 3000, 4097, 40_001])
@pytest.mark.parametrize("prompt", [0, 2])
def test_payloads_keep_what_follows_aligned(tokens: int, prompt: int) -> None:
    for text in ("", "a", "ab", "abc"):
        sample = made(tokens)
        sample.raw_logprobs = sample.logprobs
        sample.about.completion, sample.about.prompt_tokens = text, min(prompt, tokens)
        data = b"".join(put(sample))
        assert len(data) % 4 == 0
        assert Trajectory.FromString(data).prompt_tokens == min(prompt, tokens)
        back = parse(memoryview(data))
        assert back.about.prompt_tokens == min(prompt, tokens)
        if tokens > 4096:
            assert all(array.flags.aligned for array in (back.token_ids, back.logprobs, back.raw_logprobs))


def test_strided_arrays_are_made_whole() -> None:
    sample = made(10_000)
    sample.token_ids = np.arange(20_000, dtype=np.int32)[::2]
    assert np.array_equal(parse(memoryview(b"".join(put(sample)))).token_ids, sample.token_ids)


def test_arrays_that_do_not_fit_are_refused() -> None:
    for name, value in (
        ("token_ids", np.arange(4)),
        ("logprobs", np.zeros(5, np.float32)),
        ("loss_mask", np.zeros((2, 2), np.uint8)),
    ):
        sample = made(4)
        setattr(sample, name, value)
        with pytest.raises(ValueError, match="wanted"):
            put(sample)


def test_foreign_bytes_are_corrupt() -> None:
    for tokens in (8, 40_000):
        data = b"".join(put(made(tokens)))
        for spoiled in (
            data[:-1],
            data + b"\x12",
            b"\x0b" + data,
            b"\xff" * len(data),
            Trajectory(token_ids=b"123").SerializeToString(),
        ):
            with pytest.raises(PayloadCorrupt):
                parse(memoryview(spoiled))


@pytest.mark.parametrize("name", ["token_ids", "logprobs", "loss_mask", "raw_logprobs"])
def test_a_list_is_refused_with_what_is_wanted(name: str) -> None:
    plain: Any = {name: [1, 2, 3]}
    arrays = {"token_ids": np.arange(3, dtype=np.int32)} | plain
    with pytest.raises(ValueError, match=r"a list stands where an array of \w+ is wanted; make it with np\.array"):
        pieces(Sample(**arrays), b"")
