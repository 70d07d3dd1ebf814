"""Samples as arrays, and as the bytes of a serialized Trajectory."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from rollout.errors import RolloutError
from rollout.trajectory.v1.trajectory_pb2 import OUTCOME_COMPLETED, Trajectory, TrajectoryKey

if sys.byteorder != "little":
    raise ImportError("trajectories are little-endian; big-endian machines are not supported")

_DTYPES: dict[str, np.dtype[Any]] = {
    "token_ids": np.dtype("<i4"),
    "logprobs": np.dtype("<f4"),
    "raw_logprobs": np.dtype("<f4"),
    "loss_mask": np.dtype("u1"),
}


class PayloadCorrupt(RolloutError):
    """A payload differs from what the buffer accepted: another checksum, or arrays of different
    lengths."""

    reason: ClassVar[str] = "PAYLOAD_CORRUPT"


def _completed() -> Trajectory:
    return Trajectory(outcome=OUTCOME_COMPLETED)


@dataclass(slots=True, eq=False)
class Sample:
    """One sample of T tokens, prompt first.

    token_ids: int32[T]. logprobs: float32[T] under the sampling distribution, or empty. loss_mask:
    uint8[T], 1 for tokens that are trained on. raw_logprobs: float32[T] under the unmodified
    softmax, or empty. about: the other fields (reward, prompt_tokens, outcome, version_spans,
    texts) as a ``Trajectory``; its arrays are ignored, and of its key only ``part`` is used.

    Arrays that a consumer returns are read-only.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, "<f4"))
    loss_mask: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, "u1"))
    raw_logprobs: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, "<f4"))
    about: Trajectory = field(default_factory=_completed)


def encode(sample: Sample, key: TrajectoryKey) -> bytes:
    """The serialized Trajectory of a sample. Raises ``ValueError`` for arrays that do not fit each
    other."""
    message = Trajectory()
    message.CopyFrom(sample.about)
    message.key.CopyFrom(key)
    for name, dtype in _DTYPES.items():
        setattr(message, name, _bytes(getattr(sample, name), dtype, len(sample.token_ids), required=name == "token_ids"))
    return message.SerializeToString(deterministic=True)


def _bytes(array: Any, dtype: np.dtype[Any], tokens: int, *, required: bool) -> bytes:
    if not isinstance(array, np.ndarray):
        kind = type(array).__name__
        raise ValueError(f"expected an array of {dtype}, got a {kind}: create it with np.array(.., np.{dtype})")
    values = cast("NDArray[Any]", array)
    shape = values.shape
    if shape == (0,) and not required:
        return b""
    if values.dtype != dtype or shape != (tokens,):
        raise ValueError(f"expected an array {dtype}[{tokens}], got {values.dtype}{list(shape)}")
    return values.tobytes()


def parse(payload: bytes) -> Sample:
    """The sample of a serialized Trajectory. Raises :class:`PayloadCorrupt`."""
    try:
        about = Trajectory.FromString(payload)
        arrays: dict[str, Any] = {name: np.frombuffer(getattr(about, name), dtype) for name, dtype in _DTYPES.items()}
    except Exception as error:
        raise PayloadCorrupt(f"a payload of {len(payload)} bytes is not a Trajectory: {error}") from error
    sizes = {name: len(array) for name, array in arrays.items()}
    tokens = sizes["token_ids"]
    if tokens < about.prompt_tokens or any(size not in (0, tokens) for size in sizes.values()):
        raise PayloadCorrupt(f"the arrays do not match each other or the prompt of {about.prompt_tokens} tokens: {sizes}")
    fields: Any = about  # the stubs list every field name as a literal
    for name in _DTYPES:
        fields.ClearField(name)
    return Sample(**arrays, about=about)
