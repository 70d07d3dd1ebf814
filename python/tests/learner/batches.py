"""Batches of the addition example in the format of the buffer."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from pathlib import Path

import crc32c
import numpy as np
from blake3 import blake3

from rollout.buffer.v1.buffer_pb2 import Batch, SampleRef
from rollout.trajectory.v1 import trajectory_pb2 as pb

CODES = {character: 3 + number for number, character in enumerate("0123456789+-*/=")}
END = 1


def trajectories(run: str, step: int, *, groups: int = 8, size: int = 4, version: int | None = None) -> list[bytes]:
    """Serialized samples of a step by group. The rewards differ within most groups."""
    draw = random.Random(step)
    out: list[bytes] = []
    for group in range(groups):
        index = (step - 1) * groups + group
        a, b = draw.randrange(100), draw.randrange(100)
        for sample in range(size):
            completion = str(a + b if sample == 0 else draw.randrange(200))
            out.append(trajectory(run, index, sample, f"{a}+{b}=", completion, float(sample == 0), version))
    return out


def trajectory(run: str, index: int, sample: int, prompt: str, completion: str, reward: float, version: int | None) -> bytes:
    """One sample. version: None for data."""
    ids = np.array([CODES[c] for c in prompt + completion] + [END], "<i4")
    answer = len(completion) + 1
    mask = np.array([0] * len(prompt) + [1] * answer, np.uint8)
    return pb.Trajectory(
        key=pb.TrajectoryKey(run_id=run, index=index, sample=sample),
        token_ids=ids.tobytes(),
        logprobs=(-1.5 * mask).astype("<f4").tobytes(),
        raw_logprobs=(-1.5 * mask).astype("<f4").tobytes(),
        loss_mask=mask.tobytes(),
        prompt_tokens=len(prompt),
        version_spans=[] if version is None else [pb.VersionSpan(version=version, start=0, end=answer)],
        reward=reward,
        outcome=pb.OUTCOME_COMPLETED,
        prompt=prompt,
        completion=completion,
    ).SerializeToString(deterministic=True)


def batch(run: str, step: int, payloads: Sequence[bytes], segments: Path | None) -> Batch:
    """The batch, with its payloads in a segment file; None: in a file that does not exist on this
    host."""
    refs: list[SampleRef] = []
    body = bytearray(b"RSEG0001")
    path = (segments or Path("/not/here")) / f"{step}.seg"
    for payload in payloads:
        crc = crc32c.crc32c(payload)
        body += struct.pack("<II", len(payload), crc)
        sample = pb.Trajectory.FromString(payload)
        refs.append(
            SampleRef(
                key=sample.key,
                segment=str(path),
                offset=len(body),
                length=len(payload),
                crc32c=crc,
                reward=sample.reward,
                outcome=sample.outcome,
            )
        )
        body += payload
    if segments is not None:
        segments.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    groups = len({(ref.key.epoch, ref.key.index) for ref in refs})
    name = f"blake3-{blake3(bytes(body)).hexdigest()}"
    return Batch(run_id=run, step=step, batch_id=name, samples=refs, groups=groups)
