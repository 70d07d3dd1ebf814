"""Requests and samples between vLLM's steps. Everything here runs in one thread."""
# pyright: reportMissingImports=false

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.sampling_params import SamplingParams as VllmParams
from vllm.v1.engine import FinishReason as VllmReason

from rollout_workers.engines.base import (
    EngineStats,
    FinishReason,
    GroupRequest,
    PromptLogprobs,
    SampleDelta,
    SampleOutput,
    TopLogprobs,
    VersionSpan,
)
from rollout_workers.engines.errors import (
    ContextOverflow,
    EngineClosed,
    EngineError,
    EngineFailed,
    InvalidPrompt,
    NonFiniteLogits,
)
from rollout_workers.engines.transformers.sample import Group, Sink, request_error
from rollout_workers.engines.transformers.text import SampleText, Tokenizer, advance, continued
from rollout_workers.engines.vllm.core import Core
from rollout_workers.engines.vllm.sampling import params_of
from rollout_workers.engines.vllm.seeds import token_seed

_REASONS: dict[Any, FinishReason] = {VllmReason.STOP: "stop", VllmReason.LENGTH: "length", VllmReason.ABORT: "aborted"}


@dataclass(slots=True, eq=False)
class _Sample:
    """A sample in progress. ``sent``: its first token that no delta had. ``top``: alternatives of
    each token, ids [K] and logprobs [K]."""

    group: Group
    index: int
    text: SampleText | None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[Any, Any]] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    sent: int = 0
    cached: int | None = None

    def next_seed(self) -> int:
        """The seed of the next token."""
        return token_seed(self.group.request.seeds[self.index], len(self.group.continued) + len(self.ids))

    def extend(self, version: int, count: int) -> None:
        """Record that ``version`` sampled the last ``count`` tokens."""
        end = len(self.ids)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = VersionSpan(version, self.spans[-1].start, end)
        elif count:
            self.spans.append(VersionSpan(version, end - count, end))

    def alternatives(self, start: int, end: int) -> TopLogprobs | None:
        count = self.group.request.params.top_logprobs
        if not count:
            return None
        chosen = self.top[start:end]
        ids = np.array([ids for ids, _ in chosen], np.int32).reshape(len(chosen), count)
        return TopLogprobs(ids, np.array([logprobs for _, logprobs in chosen], np.float32).reshape(len(chosen), count))


class Scheduling:
    """Feeds vLLM and delivers outputs to their sinks. ``turn`` runs one step; other methods may be
    called between turns."""

    def __init__(
        self, core: Core, tokenizer: Tokenizer | None, end_ids: tuple[int, ...], *, slots: int, max_len: int, version: int
    ) -> None:
        self.core, self.tokenizer, self.version, self.cache_epoch = core, tokenizer, version, 0
        self.paused = self.offloaded = False
        self.groups: dict[str, Group] = {}
        self._names_of: dict[str, list[str]] = {}  # samples in progress by request
        self._samples: dict[str, _Sample] = {}
        self._scores: dict[str, tuple[NDArray[np.int64], int, Future[PromptLogprobs]]] = {}
        self._end_ids, self._slots, self._max_len = end_ids, slots, max_len
        self._names = 0
        self._generated = self._prompts = self._steps = 0
        self._busy = 0.0
        self._recent: deque[tuple[float, int]] = deque([(time.monotonic(), 0)], maxlen=64)

    def has_work(self) -> bool:
        """Whether ``turn`` has anything to do."""
        return not (self.paused or self.offloaded) and bool(self._samples or self._scores)

    def submit(self, requests: Sequence[GroupRequest], sink: Sink) -> None:
        """Queue requests. A request that can't be decoded is delivered at once with its error."""
        for request in requests:
            params, count = request.params, len(request.seeds)
            prompt, before = np.asarray(request.prompt_ids, np.int64), np.asarray(request.continued, np.int64)
            stop_ids = params.stop_token_ids if params.ignore_eos else (*self._end_ids, *params.stop_token_ids)
            group = Group(request, prompt, before, stop_ids, sink, deque(), count)
            limit = min(params.max_tokens, self._max_len - len(prompt))
            error = request_error(request, self._max_len, self.core.vocabulary)
            if error is None and group.watched and len(before) and self.tokenizer is not None:
                group.text = continued(params.stop, params.min_tokens, before.tolist(), self.tokenizer)
            reason = "error" if error else group.ended(limit)
            for index in range(count):
                if reason is not None or (error := self._start(group, index, limit - len(before))) is not None:
                    self._deliver(_Sample(group, index, self._text(group)), reason or "error", error)

    def abort(
        self, request_ids: Iterable[str], reason: FinishReason = "aborted", error: EngineError | None = None
    ) -> tuple[str, ...]:
        """End these requests and deliver the tokens so far. Returns the ids of the requests that
        were unfinished."""
        found = tuple(dict.fromkeys(i for i in request_ids if i in self.groups))
        for request_id in found:
            for name in tuple(self._names_of[request_id]):
                self._finish(name, reason, error, abort=True)
        return found

    def fail(self, cause: Exception) -> None:
        """End all unfinished requests with ``EngineFailed`` because a step raised."""
        error = EngineFailed(f"decoding failed: {cause!r}; all samples in progress failed; the engine continues")
        error.__cause__ = cause
        self.abort(tuple(self.groups), "error", error)
        self._end_scores(error)

    def score(self, prompt: NDArray[np.int64], top: int, answer: Future[PromptLogprobs]) -> None:
        """Queue a prompt whose tokens are to be scored. Raises ``InvalidPrompt``,
        ``ContextOverflow``."""
        if prompt.ndim != 1 or not len(prompt):
            raise InvalidPrompt("the prompt to score must be one-dimensional with at least one token id")
        if len(prompt) > self._max_len:
            raise ContextOverflow("of a prompt to score", len(prompt), self._max_len)
        if prompt.min() < 0 or prompt.max() >= self.core.vocabulary:
            raise InvalidPrompt(f"the prompt to score has token ids outside the vocabulary of {self.core.vocabulary}")
        name = self._name()
        self._scores[name] = (prompt, top, answer)
        params = VllmParams(temperature=0, max_tokens=1, prompt_logprobs=top, detokenize=False)
        self.core.add(name, prompt.tolist(), params, self._salt)

    def end(self, why: str) -> None:
        """End all requests that are in progress or wait."""
        self.abort(tuple(self.groups))
        self._end_scores(EngineClosed(why))

    def turn(self) -> None:
        """Run one step of vLLM and deliver what it sampled."""
        started, count = time.perf_counter(), 0
        grown: list[tuple[str, _Sample, FinishReason | None]] = []
        for output in self.core.step({name: sample.next_seed() for name, sample in self._samples.items()}):
            if output.request_id in self._scores:
                self._scored(output)
            elif (sample := self._samples.get(output.request_id)) is not None:
                count += self._extend(sample, output)
                reason = None if output.finish_reason is None else _REASONS.get(output.finish_reason, "error")
                grown.append((output.request_id, sample, reason))
        self._steps += 1
        self._generated += count
        self._read([(sample, reason) for _, sample, reason in grown if sample.text is not None])
        for name, sample, reason in grown:
            self._settle(name, sample, reason)
        self._busy += time.perf_counter() - started
        self._recent.append((time.monotonic(), count))

    def new_weights(self, version: int) -> None:
        """Record that the model has new weights: nothing computed with the old ones is used
        again."""
        self.core.forget_keys()
        self.version, self.cache_epoch = version, self.cache_epoch + 1

    def stats(self) -> EngineStats:
        """A reading of the counters. In other threads each number is right, but they may be from
        different moments."""
        recent = tuple(self._recent)
        elapsed = time.monotonic() - recent[0][0]
        left = len(self._samples)
        active = min(self.core.running, left)
        return EngineStats(
            slots=self._slots,
            active=active,
            queued=left - active,
            paused=self.paused,
            version=self.version,
            cache_epoch=self.cache_epoch,
            generated_tokens=self._generated,
            prompt_tokens=self._prompts,
            steps=self._steps,
            busy_seconds=self._busy,
            forward_seconds=self._busy,
            tokens_per_second=sum(n for _, n in recent[1:]) / elapsed if elapsed > 0 else 0.0,
        )

    @property
    def _salt(self) -> str:
        return f"weights-{self.cache_epoch}"

    def _name(self) -> str:
        self._names += 1
        return str(self._names)

    def _start(self, group: Group, index: int, room: int) -> EngineError | None:
        request, params, name = group.request, group.request.params, self._name()
        before = group.continued.tolist()
        wanted = params_of(params, seed=request.seeds[index], max_tokens=room, stop_ids=group.stop_ids, continued=before)
        try:
            self.core.add(name, group.sequence.tolist(), wanted, self._salt, before)
        except EngineError as error:
            return error
        self._samples[name] = _Sample(group, index, self._text(group))
        self._names_of.setdefault(request.request_id, []).append(name)
        self.groups[request.request_id] = group
        return None

    def _text(self, group: Group) -> SampleText | None:
        """The text of a new sample, if the request needs it."""
        params = group.request.params
        return group.text or (SampleText(params.stop, params.min_tokens) if group.watched else None)

    def _extend(self, sample: _Sample, output: Any) -> int:
        """Add what a step sampled. Returns the number of tokens."""
        tokens = list(output.new_token_ids)
        if sample.cached is None and output.prefill_stats is not None:
            sample.cached = output.prefill_stats.num_cached_tokens
            self._prompts += output.prefill_stats.num_computed_tokens
        if not tokens:
            return 0
        found = output.new_logprobs
        sample.ids += tokens
        sample.logprobs += [float(row[0]) for row in found.logprobs]
        if count := sample.group.request.params.top_logprobs:
            sample.top += [
                (ids[1 : count + 1], logprobs[1 : count + 1])
                for ids, logprobs in zip(found.logprob_token_ids, found.logprobs, strict=True)
            ]
        sample.extend(self.version, len(tokens))
        return len(tokens)

    def _read(self, grown: list[tuple[_Sample, FinishReason | None]]) -> None:
        """Decode the new tokens of samples that need text."""
        assert self.tokenizer is not None or not grown, "generate rejects such requests without a tokenizer"
        for sample, reason in grown:
            assert sample.text is not None
            new = sample.ids[sample.sent :]
            for token in new[:-1] if reason == "stop" and new else new:  # the end token has no text
                sample.text.push(token)
        for final in (False, True):
            texts = [sample.text for sample, reason in grown if (reason is not None) == final and sample.text is not None]
            if texts and self.tokenizer is not None:
                advance(texts, self.tokenizer, final)

    def _settle(self, name: str, sample: _Sample, reason: FinishReason | None) -> None:
        """Send the delta of a sample that has grown, and finish it if it ended."""
        if sample.logprobs and math.isnan(sample.logprobs[-1]):
            error = NonFiniteLogits("the model's logits are not finite; check the weights of this version")
            self._cut_last(sample)
            self._finish(name, "error", error, abort=reason is None)
            return
        if sample.text is not None:
            if sample.group.request.stream and len(sample.ids) > sample.sent:
                self._send(sample, sample.text.settled_text())
            sample.sent = len(sample.ids)
            if sample.text.matched:
                self._finish(name, "stop", abort=reason is None)
                return
        if reason == "error":
            self._finish(name, "error", EngineFailed("vLLM ended the sample with an error; see the worker's log"))
        elif reason is not None:
            self._finish(name, reason)

    def _cut_last(self, sample: _Sample) -> None:
        sample.ids.pop()
        sample.logprobs.pop()
        del sample.top[len(sample.ids) :]
        last = sample.spans.pop()
        if last.start < len(sample.ids):
            sample.spans.append(VersionSpan(last.version, last.start, len(sample.ids)))

    def _send(self, sample: _Sample, text: str) -> None:
        start, end = sample.sent, len(sample.ids)
        sample.group.sink.put(
            SampleDelta(
                request_id=sample.group.request.request_id,
                sample=sample.index,
                start=start,
                token_ids=np.array(sample.ids[start:end], np.int32),
                logprobs=self._logprobs(sample, start),
                raw_logprobs=None,
                text=text,
                version=self.version,
                top_logprobs=sample.alternatives(start, end),
            )
        )

    def _finish(self, name: str, reason: FinishReason, error: EngineError | None = None, *, abort: bool = False) -> None:
        """Deliver a sample. abort: vLLM still has it."""
        sample = self._samples.pop(name)
        group = sample.group
        if abort:
            self.core.abort([name])
        if group.request.stream and sample.text is not None and (rest := sample.text.remaining_text()):
            sample.sent = len(sample.ids)
            self._send(sample, rest)
        request_id = group.request.request_id
        self._names_of[request_id].remove(name)
        if not self._names_of[request_id]:
            del self._names_of[request_id], self.groups[request_id]
        self._deliver(sample, reason, error)

    def _deliver(self, sample: _Sample, reason: FinishReason, error: EngineError | None = None) -> None:
        sample.group.deliver(
            SampleOutput(
                request_id=sample.group.request.request_id,
                sample=sample.index,
                token_ids=np.array(sample.ids, np.int32),
                logprobs=self._logprobs(sample, 0),
                raw_logprobs=None,
                version_spans=tuple(sample.spans),
                finish_reason=reason,
                error=error,
                text=None if sample.text is None else sample.text.text[sample.text.start :],
                stop_string=None if sample.text is None else sample.text.matched,
                top_logprobs=sample.alternatives(0, len(sample.ids)),
                cached_tokens=sample.cached or 0,
            )
        )

    def _logprobs(self, sample: _Sample, start: int) -> NDArray[np.float32]:
        """vLLM reports the softmax of a greedy sample; its token has probability 1."""
        logprobs = np.array(sample.logprobs[start:], np.float32)
        return logprobs if sample.group.request.params.temperature else np.zeros_like(logprobs)

    def _scored(self, output: Any) -> None:
        prompt, top, answer = self._scores[output.request_id]
        if output.finish_reason is None and output.new_prompt_logprobs_tensors is None:
            return
        del self._scores[output.request_id]
        if output.finish_reason is None:
            self.core.abort([output.request_id])
        if not answer.set_running_or_notify_cancel():
            return
        count = len(prompt)
        logprobs, ids = np.zeros((count, top + 1), np.float32), np.full((count, top + 1), -1, np.int32)
        if count > 1:
            found = output.new_prompt_logprobs_tensors
            if found is None:
                answer.set_exception(EngineFailed("vLLM did not score the prompt; send it again"))
                return
            logprobs[1:], ids[1:] = found.logprobs.numpy(), found.logprob_token_ids.numpy()
        alternatives = TopLogprobs(ids[:, 1:], logprobs[:, 1:]) if top else None
        answer.set_result(PromptLogprobs(logprobs[:, 0].copy(), alternatives))

    def _end_scores(self, error: EngineError) -> None:
        for name, (_, _, answer) in tuple(self._scores.items()):
            self.core.abort([name])
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)
        self._scores.clear()
