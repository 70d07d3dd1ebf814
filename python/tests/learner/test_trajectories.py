"""Compiled code reads the very samples that protobuf does, and leaves to protobuf what it should not judge."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from rollout.trajectory.v1 import trajectory_pb2 as pb
from rollout_workers.compiled import library
from rollout_workers.learner.payload import PayloadCorrupt, of_columns, parsed
from rollout_workers.learner.trajectories import SOURCE, Reader
from rollout_workers.trainer import TrainSample


@pytest.fixture(scope="module")
def reader(libraries: Path) -> Reader:
    """``trajectories.c`` as it is."""
    return Reader(library(SOURCE, libraries / "learner"))


def drawn(draw: random.Random) -> pb.Trajectory:
    """A trajectory with each field set or not, small and large numbers, and none of what it must not have."""
    tokens = draw.choice((0, 1, 9, 300))
    numbers = draw.choice((1, 127, 128, 1 << 31, (1 << 32) - 1))
    array = np.arange(tokens, dtype="<f4")
    made = pb.Trajectory(
        token_ids=np.arange(tokens, dtype="<i4").tobytes(),
        logprobs=(-array).tobytes(),
        raw_logprobs=array.tobytes() if draw.random() < 0.5 else b"",
        loss_mask=bytes(draw.randrange(2) for _ in range(tokens)),
        prompt_tokens=draw.randrange(tokens + 1),
        reward=draw.choice((0.0, 1.0, -2.5e-300)),
        outcome=draw.choice(pb.Outcome.values()),
        reason=draw.choice(("", "REWARD_TIMEOUT")),
        prompt=draw.choice(("", "1+2=", "é\0" * 200)),
        completion=draw.choice(("", "3", "三")),
        token_rewards=array.tobytes() if draw.random() < 0.1 else b"",
        teacher_logprobs=array.tobytes() if draw.random() < 0.1 else b"",
        metrics={"length": 2.0, "reward/style": draw.random()} if draw.random() < 0.2 else {},
    )
    if draw.random() < 0.9:
        made.key.CopyFrom(pb.TrajectoryKey(run_id="run-1", index=draw.choice((0, 7, (1 << 63) - 1)), attempt=numbers))
        made.key.epoch, made.key.sample, made.key.part = (draw.choice((0, numbers)) for _ in range(3))
    made.version_spans.extend(
        pb.VersionSpan(version=draw.choice((0, 5, 1 << 40)), start=1, end=numbers, digest="blake3-00")
        for _ in range(draw.randrange(3))
    )
    return made


def same(one: TrainSample, other: TrainSample) -> None:
    for field in dataclasses.fields(TrainSample):
        mine, wanted = getattr(one, field.name), getattr(other, field.name)
        if isinstance(wanted, np.ndarray):
            assert mine.dtype == wanted.dtype and mine.tobytes() == wanted.tobytes(), field.name
        else:
            assert mine == wanted and type(mine) is type(wanted), field.name


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_workers_write_is_read_as_protobuf_reads_it(reader: Reader, seed: int) -> None:
    draw = random.Random(seed)
    payloads = [drawn(draw).SerializeToString(deterministic=True) for _ in range(draw.choice((0, 1, 30)))]
    columns = reader.read(payloads)
    assert columns is not None
    for found, payload in zip(of_columns(columns, payloads), payloads, strict=True):
        same(found, parsed(payload))


def test_a_damaged_payload_is_read_as_protobuf_reads_it_or_not_at_all(reader: Reader) -> None:
    draw = random.Random(1)
    left = 0
    for _ in range(3000):
        payload = bytearray(drawn(draw).SerializeToString(deterministic=True))
        for _ in range(draw.randrange(1, 4)):
            if payload:
                payload[draw.randrange(min(60, len(payload)))] = draw.randrange(256)
        damaged = bytes(payload[: len(payload) - draw.choice((0, 0, 1, 9))])
        columns = reader.read([damaged])
        if columns is None:
            left += 1
            continue
        try:
            wanted = parsed(damaged)
        except (DecodeError, PayloadCorrupt, ValueError) as error:
            if "UTF-8" in str(error):
                continue  # of a text that no sample has
            with pytest.raises((DecodeError, PayloadCorrupt, ValueError)):
                of_columns(columns, [damaged])
        else:
            same(of_columns(columns, [damaged])[0], wanted)
    assert left > 1000


@pytest.mark.parametrize(
    "change",
    [
        pb.Trajectory(token_ids=b"\0" * 8),
        pb.Trajectory(logprobs=b"\0" * 7),
        pb.Trajectory(loss_mask=b"\0" * 4),
        pb.Trajectory(prompt_tokens=4),
        pb.Trajectory(key=pb.TrajectoryKey(index=3)),  # a second one, which protobuf merges
        pb.Trajectory(key=pb.TrajectoryKey(index=1 << 63)),
    ],
)
def test_what_does_not_fit_is_left_to_protobuf(reader: Reader, change: pb.Trajectory) -> None:
    sound = pb.Trajectory(
        key=pb.TrajectoryKey(index=1), token_ids=b"\0" * 12, logprobs=b"\0" * 12, loss_mask=b"\0" * 3, prompt_tokens=3
    ).SerializeToString()
    assert reader.read([sound, sound]) is not None
    assert reader.read([sound, sound + change.SerializeToString()]) is None
