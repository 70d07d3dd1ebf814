"""A group and its samples on their way through the engine."""

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
    """Where a caller's outputs go. Called in the decoding thread."""

    def put(self, item: SampleDelta | SampleOutput) -> None: ...


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prompt that has run: last logits [V] and KV [layers, T, 2, heads, dim]."""

    logits: Tensor
    kv: Tensor


@dataclass(slots=True, eq=False)
class Group:
    """A request in the engine. ``pending``: samples without a slot yet. ``left``: samples not
    delivered yet."""

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
        """Whether someone reads the text of its samples as they grow."""
        return self.request.stream or bool(self.request.params.stop)


@dataclass(slots=True, eq=False)
class Sample:
    """One sample in a slot. ``span_start``: its first token under the current weights."""

    group: Group
    index: int
    text: SampleText | None
    spans: list[VersionSpan] = field(default_factory=list)
    span_start: int = 0

    def close_span(self, version: int, end: int) -> None:
        """Note that the tokens since the last call came from ``version``."""
        if end > self.span_start:
            self.spans.append(VersionSpan(version, self.span_start, end))
            self.span_start = end


def prompt_error(request: GroupRequest, prompt: NDArray[np.int64], max_len: int, vocabulary: int) -> EngineError | None:
    """Why this prompt can't be decoded, or None."""
    if prompt.ndim != 1 or not len(prompt):
        return InvalidPrompt(f"request {request.request_id}: a prompt needs at least one token id in one dimension")
    if len(prompt) >= max_len:
        return ContextOverflow(request.request_id, len(prompt), max_len)
    if prompt.min() < 0 or prompt.max() >= vocabulary:
        wrong = prompt[(prompt < 0) | (prompt >= vocabulary)][0]
        return InvalidPrompt(
            f"request {request.request_id}: token id {wrong} is outside the vocabulary of {vocabulary}; "
            "encode the prompt with the tokenizer of this model"
        )
    return None
