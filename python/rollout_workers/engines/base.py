"""The contract of an inference engine: requests, outputs and the ``Engine`` protocol (errors:
``errors.py``). Imports no torch.

One request is one prompt sampled ``len(seeds)`` times, so that an engine can run the prompt once
for the whole group.

    engine = TransformersEngine.load("/models/tiny", EngineConfig(slots=256, max_len=64))
    request = GroupRequest("epoch0/17", prompt_ids=(5, 9, 3), seeds=(1, 2, 3, 4), params=SamplingParams(max_tokens=8))
    async for output in engine.generate([request]):
        print(output.sample, output.token_ids, output.finish_reason)
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollout_workers.engines.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

Ids: TypeAlias = NDArray[np.int32]
Logprobs: TypeAlias = NDArray[np.float32]
FinishReason: TypeAlias = Literal["stop", "length", "aborted", "error"]
WeightsSource: TypeAlias = "str | os.PathLike[str] | Mapping[str, Tensor]"


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the text of a sample must match. kind: ``json_schema`` (value: the schema as JSON),
    ``json_object`` (no value), ``regex``, ``grammar`` (EBNF), ``choices`` (value: a JSON list of
    texts)."""

    kind: Literal["json_schema", "json_object", "regex", "grammar", "choices"]
    value: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters. Filters apply in the order temperature, top_k, top_p, min_p, like the
    warpers of Hugging Face.

    temperature: 0 is greedy (the first of equal maxima). top_k: 0 is off. top_p: 1 is off. min_p: 0
    is off. max_tokens: the maximum number of new tokens; the engine's context length may end a
    sample earlier. stop: strings that end a sample; the text ends before the first one, the token
    ids are not cut. stop_token_ids: end a sample, in addition to the model's end tokens, which
    ``ignore_eos`` switches off. repetition_penalty: divides the positive and multiplies the
    negative logits of tokens of the prompt and the sample (1 is off). presence_penalty,
    frequency_penalty: subtracted from the logits of tokens of the sample, once and per occurrence
    (0 is off). logit_bias: pairs of token id and what is added to its logit. Bias and penalties
    apply before the temperature. min_tokens: before it nothing ends a sample. top_logprobs: number
    of most likely tokens to report at each position. constraint: what the text must match.

    An engine supports the fields that ``Capabilities.parameters`` names, besides the first ones
    (max_tokens to ignore_eos). Raises ``ValueError`` for a value outside its range.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    top_logprobs: int = 0
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        for name, holds, rule in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < float("inf"), "finite and not negative (0 is greedy)"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (1 is off)"),
            ("top_k", self.top_k >= 0, "not negative (0 is off)"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 (off) to 1"),
            ("stop", all(self.stop), "without empty strings"),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "finite and above 0 (1 is off)"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "from -2 to 2 (0 is off)"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "from -2 to 2 (0 is off)"),
            ("logit_bias", all(abs(bias) <= 100 for _, bias in self.logit_bias), "from -100 to 100 for each token"),
            ("min_tokens", self.min_tokens >= 0, "not negative"),
            ("top_logprobs", self.top_logprobs >= 0, "not negative (0 is off)"),
        ):
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {rule}")


@dataclass(frozen=True, slots=True, eq=False)
class GroupRequest:
    """One prompt to sample ``len(seeds)`` times.

    request_id: unique among unfinished requests. prompt_ids: at least one id (a tuple or an int
    array [T]). seeds: one per sample, 64 bits used; the random number of a token depends only on
    the seed and the token's index. stream: also yield a ``SampleDelta`` per decoding step.
    continued: int32[C], only with one seed: tokens that an earlier request sampled after the
    prompt. They count for ``max_tokens``, ``min_tokens``, penalties, stop strings, and indexes of
    random numbers; ids, logprobs, text, and spans of the outputs begin after them. session: of the
    prompt, for caches; empty: none.
    """

    request_id: str
    prompt_ids: Sequence[int] | NDArray[np.integer]
    seeds: tuple[int, ...]
    params: SamplingParams
    stream: bool = False
    continued: Sequence[int] | NDArray[np.integer] = ()
    session: str = ""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) of a sample were sampled under weights ``version``."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class TopLogprobs:
    """The K most likely tokens at each of T positions, best first: token_ids int32[T, K], logprobs
    f32[T, K] of the model's softmax, or of the distribution that the engine reports."""

    token_ids: Ids
    logprobs: Logprobs


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """The score of a prompt of T tokens. logprobs f32[T]: log-softmax of the model's logits for
    each token, given the tokens before it; 0 for the first. top: of the same softmax, if requested.
    The first token has no distribution: its ids are -1 and its logprobs 0."""

    logprobs: Logprobs
    top: TopLogprobs | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SampleDelta:
    """New tokens of a streaming sample.

    start: index of the first of these tokens in the sample. text: the text that later tokens can't
    change. It never ends with a part of a character or with the beginning of a possible stop
    string, so it may lag behind the tokens. The texts concatenate to the output's text, the ids to
    its ids. version: the weights that sampled the newest token so far.
    """

    request_id: str
    sample: int
    start: int
    token_ids: Ids
    logprobs: Logprobs
    raw_logprobs: Logprobs | None
    text: str
    version: int
    top_logprobs: TopLogprobs | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SampleOutput:
    """One finished sample of T tokens.

    token_ids int32[T]: as sampled, with the end token if there was one. logprobs f32[T]: one per
    token, of the distribution that ``Capabilities.logprobs_mode`` names: the sampling distribution
    (after temperature and filters; 0 for greedy), or the model's softmax. raw_logprobs f32[T]:
    log-softmax of the model's logits; None if the engine reports one logprob per token.
    version_spans: cover [0, T) without gaps, in order. finish_reason: ``length`` if max_tokens or
    the end of the context was reached. error: set only if finish_reason is ``error``. text: without
    the stop string or end token; None unless the request has stop strings or streams. stop_string:
    the stop string that ended the sample. top_logprobs: of every token, if requested.
    cached_tokens: tokens of the prompt whose computation was reused.
    """

    request_id: str
    sample: int
    token_ids: Ids
    logprobs: Logprobs
    raw_logprobs: Logprobs | None
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    error: EngineError | None = None
    text: str | None = None
    stop_string: str | None = None
    top_logprobs: TopLogprobs | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters and speeds of the engine. samples and tokens count from the start; tokens/s is over
    the last steps.

    prompt_tokens: of the prompts that began. prefilled_tokens: tokens of prompts that were
    computed, not reused.

    cache_epoch: grows with every weight swap; KV from before a swap is only used by samples that
    were in progress then. busy_seconds: total time of admitting and decoding (model, sampling, and
    bookkeeping, without waiting). forward_seconds: the part of it in the model's passes (on a GPU:
    until they were queued).
    """

    slots: int
    active: int
    queued: int
    paused: bool
    version: int
    cache_epoch: int
    generated_tokens: int
    prompt_tokens: int
    steps: int
    busy_seconds: float
    forward_seconds: float
    tokens_per_second: float
    prefilled_tokens: int = 0


class Engine(Protocol):
    """The interface of an engine for a worker. Every call may be repeated. Methods may be called
    while ``generate`` runs."""

    def generate(self, batch: Sequence[GroupRequest]) -> AsyncIterator[SampleDelta | SampleOutput]:
        """Sample every request. Yields exactly one output per sample when it finishes, in any
        order.

        An invalid request yields outputs with an error and does not affect the others. Closing the
        iterator aborts the unfinished samples. Raises ``DuplicateRequest``, ``TokenizerMissing``,
        ``EngineClosed`` before anything starts.
        """
        ...

    async def prompt_logprobs(self, prompt_ids: Ids, top: int = 0) -> PromptLogprobs:
        """The logprobs of the tokens of ``prompt_ids`` (int32[T]) and the ``top`` most likely
        tokens at each position. Computed between two decoding steps with the current weights. Waits
        while the engine is paused.

        Raises ``InvalidPrompt``, ``ContextOverflow`` (a prompt may fill the context),
        ``EngineClosed``, ``EngineFailed``.
        """
        ...

    async def abort(self, request_ids: Sequence[str]) -> tuple[str, ...]:
        """End these requests. Their samples are delivered with the tokens so far, as ``aborted``.

        Returns the ids of the requests that were unfinished.
        """
        ...

    async def pause(self) -> None:
        """Return when no forward pass is running and none will start until ``resume``. Slots keep
        their state."""
        ...

    async def resume(self) -> None:
        """Continue where ``pause`` stopped."""
        ...

    async def offload(self) -> None:
        """Move weights and KV to the host to free the accelerator's memory. Nothing is decoded
        until ``onload``."""
        ...

    async def onload(self) -> None:
        """Undo ``offload``. The restored bits are the same."""
        ...

    async def stage_weights(self, source: WeightsSource, expected: str | None = None) -> str:
        """Read and verify weights while decoding continues. Returns the root of their digest
        (``blake3-<hex>``).

        source: a weights folder, or tensors by Hugging Face name (tied tensors once). expected: the
        required root. If the root differs or ``expected`` is missing, a folder is compared with its
        manifest. Raises ``WeightsMismatch``, which names the first tensor that differs.
        """
        ...

    async def swap_weights(self, version: int) -> None:
        """Load the staged weights between two tokens, as ``version``. Samples in progress continue
        in a new version span.

        If nothing is staged, the call does nothing for the current ``version`` and raises
        ``NothingStaged`` for any other.
        """
        ...

    async def weights_digest(self) -> str:
        """The digest's root over the tensors in the model. It is never computed during a swap."""
        ...

    def stats(self) -> EngineStats: ...

    async def shutdown(self) -> None:
        """Abort and deliver all unfinished samples, and free all resources."""
        ...


class SampledWeights(Protocol):
    """What engines whose ``Capabilities.verifies`` has ``sampled`` implement besides ``Engine``."""

    async def check_weights(self, seed: int, most_bytes: int) -> str:
        """Compare random tensors in the model, of at most ``most_bytes`` together but at least one,
        with those that the last ``swap_weights`` loaded.

        Returns the name of the first that differs, or "".
        """
        ...
