"""A group and its samples inside the engine."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rollout_workers.engines.base import FinishReason, GroupRequest, SampleDelta, SampleOutput, TopLogprobs, VersionSpan
from rollout_workers.engines.errors import ContextOverflow, EngineError, InvalidParameters, InvalidPrompt
from rollout_workers.engines.transformers.constraint import Match
from rollout_workers.engines.transformers.prefixes import Prefix
from rollout_workers.engines.transformers.text import SampleText


class Sink(Protocol):
    """Receives a caller's outputs. Called in the decoding thread."""

    def put(self, item: SampleDelta | SampleOutput) -> None: ...


@dataclass(slots=True, eq=False)
class Part:
    """The beginning of a prompt: its first ``count`` tokens are computed. kv [layers, 1, >= count,
    2, heads, dim]."""

    kv: Tensor
    count: int


@dataclass(slots=True, eq=False)
class Group:
    """A request in the engine. ``continued``: tokens of its only sample that an earlier request
    sampled. ``pending``: samples without a slot. ``left``: samples that were not delivered.
    ``text``: of the continued tokens. ``prefix``: its computed prompt, ``part``: the beginning of
    it. ``match``: of its continued tokens with its constraint. ``cached``: tokens of it that an
    earlier request computed."""

    request: GroupRequest
    prompt: NDArray[np.int64]
    continued: NDArray[np.int64]
    stop_ids: tuple[int, ...]
    sink: Sink
    pending: deque[int]
    left: int
    prefix: Prefix | None = None
    part: Part | None = None
    cached: int = 0
    match: Match | None = None
    text: SampleText | None = None

    @property
    def sequence(self) -> NDArray[np.int64]:
        """The tokens before the first new one."""
        return np.concatenate((self.prompt, self.continued)) if len(self.continued) else self.prompt

    @property
    def reusable(self) -> bool:
        """Whether later requests are likely to begin like this one or its samples: turns of a
        session, or completions that a client reads."""
        return bool(self.request.session) or self.request.stream

    def ended(self, limit: int) -> FinishReason | None:
        """Why its continued tokens are complete already, or None."""
        params, count = self.request.params, len(self.continued)
        if not count:
            return None
        if self.text is not None and self.text.matched is not None:
            return "stop"
        if count > params.min_tokens and int(self.continued[-1]) in self.stop_ids:
            return "stop"
        return "length" if count >= limit else None

    def forget(self) -> None:
        """Drop what was computed of its prompt."""
        self.prefix = self.part = None
        self.cached = 0

    def deliver(self, output: SampleOutput) -> None:
        self.left -= 1
        self.sink.put(output)

    def deliver_empty(self, sample: int, reason: FinishReason, error: EngineError | None = None) -> None:
        """Deliver a sample that never got a slot."""
        empty = np.empty(0, np.float32)
        output = SampleOutput(self.request.request_id, sample, np.empty(0, np.int32), empty, empty, (), reason, error)
        if self.watched:
            output = replace(output, text="", stop_string=None if self.text is None else self.text.matched)
        self.deliver(output)

    @property
    def watched(self) -> bool:
        """Whether the texts of its samples are streamed."""
        return self.request.stream or bool(self.request.params.stop)


@dataclass(slots=True, eq=False)
class Sample:
    """A sample in a slot. ``span_start``: its first token with the current weights. ``top``: the
    logprobs and ids of the most likely tokens at each new token. ``epoch``: of the cache when it
    began."""

    group: Group
    index: int
    text: SampleText | None
    epoch: int
    match: Match | None = None
    spans: list[VersionSpan] = field(default_factory=list)
    span_start: int = 0
    top: list[tuple[NDArray[np.float32], NDArray[np.int64]]] = field(default_factory=list)

    @property
    def begin(self) -> int:
        """The index of its first new token."""
        return len(self.group.continued)

    def top_logprobs(self, start: int, end: int) -> TopLogprobs | None:
        """The most likely tokens at the new tokens [start, end), if requested."""
        count = self.group.request.params.top_logprobs
        if not count:
            return None
        if start == end:
            return TopLogprobs(np.empty((0, count), np.int32), np.empty((0, count), np.float32))
        logprobs, tokens = zip(*self.top[start:end], strict=True)
        return TopLogprobs(np.stack(tokens).astype(np.int32), np.stack(logprobs))

    def close_span(self, version: int, generated: int) -> None:
        """Record that ``version`` sampled the tokens since the last call."""
        end = generated - self.begin
        if end > self.span_start:
            self.spans.append(VersionSpan(version, self.span_start, end))
            self.span_start = end


def request_error(request: GroupRequest, max_len: int, vocabulary: int) -> EngineError | None:
    """The error of a request that can't be decoded, or None."""
    prompt, continued = np.asarray(request.prompt_ids, np.int64), np.asarray(request.continued, np.int64)
    if prompt.ndim != 1 or not len(prompt):
        return InvalidPrompt(f"request {request.request_id}: the prompt must be one-dimensional with at least one token id")
    if len(prompt) >= max_len:
        return ContextOverflow(request.request_id, len(prompt), max_len)
    sequence = np.concatenate((prompt, continued))
    if sequence.min() < 0 or sequence.max() >= vocabulary:
        wrong = sequence[(sequence < 0) | (sequence >= vocabulary)][0]
        return InvalidPrompt(
            f"request {request.request_id}: token id {wrong} is outside the vocabulary of {vocabulary}; "
            "encode the prompt with the tokenizer of this model"
        )
    if len(continued) and len(request.seeds) != 1:
        return InvalidParameters(
            f"request {request.request_id}: it continues a sample but has {len(request.seeds)} seeds; "
            "send one request with one seed for each sample that continues"
        )
    biased = [token for token, _ in request.params.logit_bias if not 0 <= token < vocabulary]
    if biased:
        return InvalidParameters(
            f"request {request.request_id}: logit_bias has token id {biased[0]}, which is outside the vocabulary of "
            f"{vocabulary}; use ids of this model's tokenizer"
        )
    return None
