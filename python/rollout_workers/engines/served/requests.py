"""Requests and samples between the caller and a server. Everything here runs in the server's
thread."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_workers.engines.base import EngineStats, FinishReason, GroupRequest, SampleDelta, SampleOutput, TopLogprobs
from rollout_workers.engines.errors import EngineClosed, EngineError, EngineFailed
from rollout_workers.engines.served.parts import Parts
from rollout_workers.engines.served.server import Asked, Scored, Server
from rollout_workers.engines.transformers.sample import request_error
from rollout_workers.engines.transformers.stream import Outbox, Stream
from rollout_workers.engines.transformers.text import SampleText, Tokenizer, advance, continued

_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


@dataclass(slots=True, eq=False)
class Group:
    """A request in progress. left: its samples that were not delivered."""

    request: GroupRequest
    prompt: list[int]
    continued: list[int]
    stream: Stream
    left: set[Sample] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Sample:
    """A sample in progress. text: if it has stop strings or streams. sent: its first token that no
    delta had. started: whether the server has it."""

    group: Group
    index: int
    text: SampleText | None
    parts: Parts = field(default_factory=Parts)
    sent: int = 0
    started: bool = False
    task: asyncio.Task[None] | None = None


class Requests:
    """Runs samples on a server and delivers their outputs."""

    def __init__(
        self, server: Server, outbox: Outbox, tokenizer: Tokenizer | None, end_ids: tuple[int, ...], *,
        slots: int, max_len: int, vocabulary: int, version: int,
    ) -> None:  # fmt: skip
        self.groups: dict[str, Group] = {}
        self.version, self.cache_epoch = version, 0
        self._server, self._outbox, self._tokenizer, self._end_ids = server, outbox, tokenizer, end_ids
        self._slots, self._max_len, self._vocabulary = slots, max_len, vocabulary
        self._paused = self._offloaded = self._closed = False
        self._open, self._changes = asyncio.Event(), asyncio.Lock()
        self._open.set()
        self._active = self._queued = 0
        self._generated = self._prompts = self._steps = 0
        self._busy, self._since = 0.0, 0.0
        self._recent: deque[tuple[float, int]] = deque([(time.monotonic(), 0)], maxlen=256)
        server.on_failure(self.fail)

    def submit(self, requests: Sequence[GroupRequest], stream: Stream) -> None:
        """Start requests. One that can't be sampled is delivered at once with its error. Raises
        ``EngineClosed``."""
        if self._closed:
            raise EngineClosed("the engine was shut down")
        for request in requests:
            error = request_error(request, self._max_len, self._vocabulary) or self._server.refusal(request)
            prompt, known = ([], []) if error else ([int(i) for i in ids] for ids in (request.prompt_ids, request.continued))
            group = Group(request, prompt, known, stream)
            room = min(request.params.max_tokens - len(group.continued), self._max_len - len(group.prompt) - len(group.continued))
            self.groups[request.request_id] = group
            for index in range(len(request.seeds)):
                sample = self._sample(group, index)
                group.left.add(sample)
                self._queued += 1
                if error is not None or room < 1:
                    self._finish(sample, "error" if error else "length", error)
                elif self._ended(sample):
                    self._finish(sample, "stop")
                else:
                    sample.task = asyncio.get_running_loop().create_task(self._run(sample, room))
            if not group.left:
                self.groups.pop(request.request_id, None)
        self._flush()

    def abort(self, request_ids: Sequence[str]) -> tuple[str, ...]:
        """End these requests and deliver the tokens so far. Returns the ids of the requests that
        were unfinished."""
        found = tuple(dict.fromkeys(name for name in request_ids if name in self.groups))
        for name in found:
            for sample in tuple(self.groups[name].left):
                self._finish(sample, "aborted")
        return found

    def fail(self, why: str) -> None:
        """End all requests with ``EngineFailed``."""
        for group in tuple(self.groups.values()):
            for sample in tuple(group.left):
                self._finish(sample, "error", EngineFailed(why))

    async def score(self, prompt: list[int], top: int) -> Scored:
        """Score a prompt. Raises ``EngineClosed``, ``EngineFailed``."""
        await self._open.wait()
        if self._closed:
            raise EngineClosed("the engine was shut down")
        self._prompts += len(prompt)
        return await self._server.score(prompt, top)

    async def pause(self) -> None:
        async with self._changes:
            self._paused = True
            await self._settle()

    async def resume(self) -> None:
        async with self._changes:
            self._paused = False
            await self._settle()

    async def offload(self) -> None:
        async with self._changes:
            self._offloaded = True
            await self._settle()

    async def onload(self) -> None:
        async with self._changes:
            self._offloaded = False
            await self._settle()

    async def swap(self, folder: str, version: int) -> None:
        """Load the weights of a folder between two tokens. Keys and values of old weights are
        dropped; samples in progress compute theirs again. Raises ``EngineFailed``."""
        async with self._changes:
            self._open.clear()
            await self._server.pause()
            await self._server.restore()
            try:
                await self._server.load(folder, str(version))
                self.version, self.cache_epoch = version, self.cache_epoch + 1
            finally:
                await self._settle()

    async def end(self) -> None:
        """End all requests; later ones are refused."""
        self._closed = True
        self.abort(tuple(self.groups))
        self._open.set()
        self._outbox.flush()

    def stats(self) -> EngineStats:
        """A reading of the counters. In other threads each number is right, but they may be from
        different moments."""
        recent = tuple(self._recent)
        elapsed = time.monotonic() - recent[0][0]
        running = time.monotonic() - self._since if self._active else 0.0
        active = min(self._active, self._slots)
        return EngineStats(
            slots=self._slots,
            active=active,
            queued=self._queued + self._active - active,
            paused=self._paused,
            version=self.version,
            cache_epoch=self.cache_epoch,
            generated_tokens=self._generated,
            prompt_tokens=self._prompts,
            steps=self._steps,
            busy_seconds=self._busy + running,
            forward_seconds=self._busy + running,
            tokens_per_second=sum(count for _, count in recent[1:]) / elapsed if elapsed > 0 else 0.0,
        )

    async def _settle(self) -> None:
        """Make the server paused, released, or running, as was asked last."""
        if self._paused or self._offloaded:
            self._open.clear()
            await self._server.pause()
        if self._offloaded:
            await self._server.release()
            return
        await self._server.restore()
        if not self._paused:
            await self._server.resume()
            self._open.set()

    def _sample(self, group: Group, index: int) -> Sample:
        params, text = group.request.params, None
        if self._tokenizer is not None and (group.request.stream or params.stop):
            text = continued(params.stop, params.min_tokens, group.continued, self._tokenizer)
        return Sample(group, index, text)

    def _ended(self, sample: Sample) -> bool:
        """Whether the continued tokens end with a stop string or an end token already."""
        known, params = sample.group.continued, sample.group.request.params
        if sample.text is not None and sample.text.matched:
            return True
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._end_ids)}
        return len(known) > params.min_tokens and known[-1] in ends

    async def _run(self, sample: Sample, room: int) -> None:
        """Sample until the server or a stop string ends it. An abort cancels this task."""
        request = sample.group.request
        try:
            await self._open.wait()
            self._start(sample)
            async with contextlib.aclosing(self._server.stream(self._asked(sample, room))) as chunks:
                async for chunk in chunks:
                    if self._grow(sample, chunk):
                        return
            finish = sample.parts.finish or {}
            reason = _REASONS.get(str(finish.get("type")))
            if reason is None:
                raise EngineFailed(f"request {request.request_id}: the server ended the sample: {finish.get('message', finish)}")
            self._finish(sample, reason)
        except asyncio.CancelledError:
            self._finish(sample, "aborted")
        except EngineError as error:
            self._finish(sample, "error", error)
        except Exception as error:
            failed = EngineFailed(f"request {request.request_id}: the server refused it: {error}")
            failed.__cause__ = error
            self._finish(sample, "error", failed)

    def _asked(self, sample: Sample, room: int) -> Asked:
        group, seed = sample.group, sample.group.request.seeds[sample.index]
        salt = f"weights-{self.cache_epoch}"
        return Asked(group.prompt, group.continued, group.request.params, seed, room, self._end_ids, salt)

    def _start(self, sample: Sample) -> None:
        sample.started = True
        self._queued -= 1
        if not self._active:
            self._since = time.monotonic()
        self._active += 1
        self._prompts += len(sample.group.prompt)

    def _grow(self, sample: Sample, chunk: Mapping[str, Any]) -> bool:
        """Add a chunk and send what is new. Returns whether a stop string or token ended the
        sample; SGLang ignores stop tokens together with ``ignore_eos``."""
        parts, text, params = sample.parts, sample.text, sample.group.request.params
        first = len(parts.ids)
        count = parts.add(chunk)
        self._generated += count
        self._steps += 1
        self._recent.append((time.monotonic(), count))
        last = len(parts.ids) - 1 if (parts.finish or {}).get("type") == "stop" else None
        stopped = False
        for at, token in enumerate(parts.ids[first:], first):
            stopped = params.ignore_eos and token in params.stop_token_ids
            if text is not None and self._tokenizer is not None and not stopped and at != last:  # an end token has no text
                text.push(token)
                advance([text], self._tokenizer)
                stopped = text.matched is not None
            if stopped:
                parts.cut(at + 1)
                break
        if text is not None and self._tokenizer is not None:
            if (stopped or parts.finish) and not text.matched:
                advance([text], self._tokenizer, final=True)
            if sample.group.request.stream and len(parts.ids) > sample.sent:
                self._send(sample, text.settled_text())
        if stopped:
            self._finish(sample, "stop")
        return stopped

    def _send(self, sample: Sample, text: str) -> None:
        start = sample.sent
        spans = sample.parts.version_spans(self.version)
        sample.sent = len(sample.parts.ids)
        sample.group.stream.put(
            SampleDelta(
                request_id=sample.group.request.request_id,
                sample=sample.index,
                start=start,
                token_ids=np.array(sample.parts.ids[start:], np.int32),
                logprobs=self._logprobs(sample, start),
                raw_logprobs=None,
                text=text,
                version=spans[-1].version if spans else self.version,
                top_logprobs=self._top(sample, start),
            )
        )
        self._flush()

    def _finish(self, sample: Sample, reason: FinishReason, error: EngineError | None = None) -> None:
        """Deliver a sample, once."""
        group, parts = sample.group, sample.parts
        if sample not in group.left:
            return
        output = SampleOutput(
            request_id=group.request.request_id,
            sample=sample.index,
            token_ids=np.array(parts.ids, np.int32),
            logprobs=self._logprobs(sample, 0),
            raw_logprobs=None,
            version_spans=parts.version_spans(self.version),
            finish_reason=reason,
            error=error,
            text=None if sample.text is None else sample.text.text[sample.text.start :],
            stop_string=None if sample.text is None else sample.text.matched,
            top_logprobs=self._top(sample, 0),
            cached_tokens=min(parts.cached, len(group.prompt)),
        )
        group.left.remove(sample)
        if not group.left:
            self.groups.pop(group.request.request_id, None)
        if sample.started:
            self._active -= 1
            if not self._active:
                self._busy += time.monotonic() - self._since
        else:
            self._queued -= 1
        if sample.task is not None and sample.task is not asyncio.current_task():
            sample.task.cancel()
        if group.request.stream and sample.text is not None and (rest := sample.text.remaining_text()):
            self._send(sample, rest)
        group.stream.put(output)
        self._flush()

    def _flush(self) -> None:
        """Deliver what was put, with one call per turn of the event loop."""
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flushed)

    _flushing = False

    def _flushed(self) -> None:
        self._flushing = False
        self._outbox.flush()

    def _logprobs(self, sample: Sample, start: int) -> NDArray[np.float32]:
        """Servers report the softmax of a greedy sample; its token has probability 1."""
        logprobs = np.array(sample.parts.logprobs[start:], np.float32)
        return logprobs if sample.group.request.params.temperature else np.zeros_like(logprobs)

    def _top(self, sample: Sample, start: int) -> TopLogprobs | None:
        count = sample.group.request.params.top_logprobs
        if not count:
            return None
        chosen = sample.parts.top[start:]
        shape = len(chosen), count
        return TopLogprobs(
            np.array([ids for ids, _ in chosen], np.int32).reshape(shape),
            np.array([logprobs for _, logprobs in chosen], np.float32).reshape(shape),
        )
