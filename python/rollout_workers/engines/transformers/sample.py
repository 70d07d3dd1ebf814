"""A group and its samples inside the engine."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rollout_workers.engines.base import FinishReason, GroupRequest, SampleDelta, SampleOutput, VersionSpan
from rollout_workers.engines.errors import ContextOverflow, EngineError, InvalidPrompt
from rollout_workers.engines.transformers.text import SampleText


class Sink(Protocol):
    """Receives a caller's outputs. Called in the decoding thread."""

    def put(self, item: SampleDelta | SampleOutput) -> None: ...


@dataclass(frozen=True, slots=True)
class Prefix:
    """A computed prompt: last logits [V] and KV [layers, T, 2, heads, dim]."""

    logits: Tensor
    kv: Tensor


@dataclass(slots=True, eq=False)
class Group:
    """A request in the engine. ``pending``: samples without a slot. ``left``: samples that were not
    delivered."""

    request: GroupRequest
    prompt: NDArray[np.int64]
    stop_ids: tuple[int, ...]
    sink: Sink
    pending: deque[int]
    left: int
    prefix: Prefix | None = None

    def deliver(self, output: SampleOutput) -> None:
        self.left -= 1
        self.sink.put(output)

    def deliver_empty(self, sample: int, reason: FinishReason, error: EngineError | None = None) -> None:
        """Deliver a sample that never got a slot."""
        empty = np.empty(0, np.float32)
        text = "" if self.watched else None
        self.deliver(SampleOutput(self.request.request_id, sample, np.empty(0, np.int32), empty, empty, (), reason, error, text))

    @property
    def watched(self) -> bool:
        """Whether the texts of its samples are streamed."""
        return self.request.stream or bool(self.request.params.stop)


@dataclass(slots=True, eq=False)
class Sample:
    """A sample in a slot. ``span_start``: its first token with the current weights."""

    group: Group
    index: int
    text: SampleText | None
    spans: list[VersionSpan] = field(default_factory=list)
    span_start: int = 0

    def close_span(self, version: int, end: int) -> None:
        """Record that ``version`` sampled the tokens since the last call."""
        if end > self.span_start:
            self.spans.append(VersionSpan(version, self.span_start, end))
            self.span_start = end


def prompt_error(request: GroupRequest, prompt: NDArray[np.int64], max_len: int, vocabulary: int) -> EngineError | None:
    """The error of a prompt that can't be decoded, or None."""
    if prompt.ndim != 1 or not len(prompt):
        return InvalidPrompt(f"request {request.request_id}: the prompt must be one-dimensional with at least one token id")
    if len(prompt) >= max_len:
        return ContextOverflow(request.request_id, len(prompt), max_len)
    if prompt.min() < 0 or prompt.max() >= vocabulary:
        wrong = prompt[(prompt < 0) | (prompt >= vocabulary)][0]
        return InvalidPrompt(
            f"request {request.request_id}: token id {wrong} is outside the vocabulary of {vocabulary}; "
            "encode the prompt with the tokenizer of this model"
        )
    return None
