"""The decoding loop: admits requests, computes steps, and finishes samples. Everything here runs in
one thread in inference mode."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollout_workers.engines.base import EngineStats, FinishReason, GroupRequest, PromptLogprobs, SampleDelta, SampleOutput
from rollout_workers.engines.errors import EngineClosed, EngineError, EngineFailed, InvalidConstraint, NonFiniteLogits
from rollout_workers.engines.transformers.config import EngineConfig
from rollout_workers.engines.transformers.constraint import Constraints
from rollout_workers.engines.transformers.forward import choose_forward
from rollout_workers.engines.transformers.kv import KvCache, Segment
from rollout_workers.engines.transformers.prefill import by_bucket, by_part, by_size
from rollout_workers.engines.transformers.prefixes import Prefix, Prefixes
from rollout_workers.engines.transformers.row_order import is_scattered, loose_segments, moves, segments
from rollout_workers.engines.transformers.sample import Group, Part, Sample, Sink, request_error
from rollout_workers.engines.transformers.sampler import Controls, sample
from rollout_workers.engines.transformers.score import Scoring
from rollout_workers.engines.transformers.slots import Slots, SlotTable
from rollout_workers.engines.transformers.text import SampleText, Tokenizer, advance, continued

_MOST_PREFIX_BYTES = 1 << 30
_SORT_EVERY = 16  # steps between two sorts in the fast mode, where sorting only saves reads


@dataclass(slots=True)
class Counters:
    """Totals since the engine was started."""

    generated_tokens: int = 0
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    steps: int = 0
    busy_seconds: float = 0.0
    forward_seconds: float = 0.0


@dataclass(slots=True)
class Parked:
    """The tensors that ``offload`` moved to the host. kv [layers, n, L, 2, heads, dim] of
    ``slots``; None: recompute it."""

    slots: Slots
    kv: Tensor | None


class Decoder:
    """Decodes requests and delivers outputs to their sinks. ``turn`` does one round of work; other
    methods may be called between turns."""

    def __init__(
        self, module: PreTrainedModel, config: EngineConfig, tokenizer: Tokenizer | None, end_ids: tuple[int, ...], version: int
    ) -> None:
        self.module, self.config, self.tokenizer, self.end_ids = module, config, tokenizer, end_ids
        self.vocabulary = module.config.get_text_config().vocab_size
        self.version, self.cache_epoch = version, 0
        self.paused = False
        self.counters = Counters()
        self.groups: dict[str, Group] = {}
        self.queue: deque[Group] = deque()
        self.constraints = Constraints(tokenizer, self.vocabulary, end_ids)
        self.scoring = Scoring(module, config.max_len, self.vocabulary)
        self.table = SlotTable(config.slots, config.rows, config.max_len, self.vocabulary)
        self._recent: deque[tuple[float, int]] = deque([(time.monotonic(), 0)], maxlen=64)
        self._parked: Parked | None = None
        self.device = next(module.parameters()).device
        with torch.inference_mode(False):
            self.forward = choose_forward(module, config.max_len)
        self.cache = KvCache.empty(self.forward.shape, config.rows, config.max_len, self.device)
        most = min(self.cache.data.nbytes, _MOST_PREFIX_BYTES)
        self.prefixes = Prefixes(most if config.prefix_bytes is None else config.prefix_bytes)

    def has_work(self) -> bool:
        """Whether ``turn`` has anything to do."""
        return not self.paused and self._parked is None and bool(self.scoring or self.queue or self.table.active.any())

    def submit(self, requests: Sequence[GroupRequest], sink: Sink) -> None:
        """Queue requests. A request that can't be decoded is delivered at once with its error."""
        for request in requests:
            prompt = np.asarray(request.prompt_ids, dtype=np.int64)
            params = request.params
            stop_ids = params.stop_token_ids if params.ignore_eos else (*self.end_ids, *params.stop_token_ids)
            count = len(request.seeds)
            known = np.asarray(request.continued, dtype=np.int64)
            group = Group(request, prompt, known, stop_ids, sink, deque(range(count)), count)
            error = request_error(request, self.config.max_len, self.vocabulary) or self._constrain(group)
            if error is None and group.watched and len(known):
                group.text = continued(params.stop, params.min_tokens, known.tolist(), self._text_of())
            ended = "error" if error is not None else self._ended(group)
            if ended is not None:
                for index in group.pending:
                    group.deliver_empty(index, ended, error)
            elif count:
                self.groups[request.request_id] = group
                self.queue.append(group)

    def _ended(self, group: Group) -> FinishReason | None:
        """Why the continued tokens of a group are complete already, or None."""
        limit = self._limit(group)
        if len(group.continued) and group.match is not None and group.match.complete:
            return "stop" if len(group.continued) >= limit or not self._has_end(group) else None
        return group.ended(limit)

    def _has_end(self, group: Group) -> bool:
        """Whether an end token of the model ends its samples."""
        return any(end in group.stop_ids for end in self.end_ids)

    def _constrain(self, group: Group) -> EngineError | None:
        """Compile the constraint of a group. Returns why it can't be used, or None."""
        constraint = group.request.params.constraint
        if constraint is None:
            return None
        found = self.constraints.compiled(constraint)
        if isinstance(found, EngineError):
            return found
        group.match = found.copy()
        if not group.match.take(group.continued.tolist()):
            return InvalidConstraint(
                f"request {group.request.request_id}: the tokens to continue do not match the constraint ({constraint.kind}); "
                "send the constraint of the request that sampled them"
            )
        return None

    def _limit(self, group: Group) -> int:
        """The maximum number of tokens of its samples."""
        return min(group.request.params.max_tokens, self.config.max_len - len(group.prompt))

    def _text_of(self) -> Tokenizer:
        assert self.tokenizer is not None, "the engine has no tokenizer, and generate rejects such requests"
        return self.tokenizer

    def abort(
        self, request_ids: Iterable[str], reason: FinishReason = "aborted", error: EngineError | None = None
    ) -> tuple[str, ...]:
        """End these requests and deliver the tokens so far. Returns the ids of the requests that
        were unfinished."""
        found = tuple(dict.fromkeys(i for i in request_ids if i in self.groups))
        doomed = {id(self.groups[i]) for i in found}
        slots = [s for s in self.table.used().tolist() if id(self.table.owner[s].group) in doomed]
        self._finish(np.array(slots, np.int64), reason, error)
        for request_id in found:
            group = self.groups.pop(request_id, None)
            if group is not None:
                self.queue.remove(group)
                for index in group.pending:
                    group.deliver_empty(index, reason, error)
        return found

    def fail(self, cause: Exception) -> None:
        """End all unfinished requests with ``EngineFailed`` because a turn raised, and reset."""
        error = EngineFailed(f"decoding failed: {cause!r}; all samples in progress failed; the engine continues")
        error.__cause__ = cause
        self.abort(tuple(self.groups), "error", error)
        self.queue.clear()
        self.prefixes.clear()
        self.cache.data.zero_()

    def score(self, prompt: NDArray[np.int64], top: int, answer: Future[PromptLogprobs]) -> None:
        """Queue a prompt whose tokens are to be scored. Raises ``InvalidPrompt``,
        ``ContextOverflow``."""
        self.scoring.add(prompt, top, answer)

    def end(self, why: str) -> None:
        """End all requests that are in progress or wait."""
        self.abort(tuple(self.groups))
        self.scoring.end(EngineClosed(why))

    def turn(self) -> None:
        """Score a waiting prompt, admit the samples that fit, then decode one token for every slot
        in use."""
        started, before = time.perf_counter(), self.counters.generated_tokens
        if self.scoring:
            self.scoring.one()
        self._admit()
        self._arrange()
        self._step()
        self.counters.busy_seconds += time.perf_counter() - started
        self._recent.append((time.monotonic(), self.counters.generated_tokens - before))

    def new_weights(self, version: int) -> None:
        """Record that the module has new weights: close version spans, drop cached prompts, and
        recompute KV if the config says so."""
        used = self.table.used()
        for slot in used.tolist():
            self.table.owner[slot].close_span(self.version, int(self.table.generated[slot]))
        self._forget()
        self.version, self.cache_epoch = version, self.cache_epoch + 1
        if self.config.kv_on_swap == "recompute":
            if self._parked is None:
                self._recompute(used)
            else:
                self._parked.kv = None

    def _forget(self) -> None:
        """Drop all KV but that of samples in progress."""
        self.prefixes.clear()
        for group in self.queue:
            group.forget()

    def offload(self) -> None:
        """Move weights and the KV of samples in progress to the host and free the rest. No turn
        runs until ``onload``."""
        if self._parked is not None:
            return
        self._forget()
        used = self.table.used()
        length = int(self.table.positions.max())
        self._parked = Parked(used, self.cache.data[:, self._tensor(used), :length].cpu())
        self.cache.data = self.cache.data[:, :0].clone()
        with torch.inference_mode(False):
            nn.Module.to(self.module, "cpu")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Undo ``offload``."""
        if self._parked is None:
            return
        parked, self._parked = self._parked, None
        with torch.inference_mode(False):
            nn.Module.to(self.module, self.device)
            self.forward = self.forward.rebuilt()
        self.cache = KvCache.empty(self.forward.shape, self.config.rows, self.config.max_len, self.device)
        if parked.kv is None:
            self._recompute(self.table.used())
        elif len(parked.slots):
            self.cache.write(self._tensor(parked.slots), parked.kv.to(self.device))

    def stats(self) -> EngineStats:
        """A reading of the counters. In other threads each number is right, but they may be from
        different moments."""
        recent = tuple(self._recent)
        elapsed = time.monotonic() - recent[0][0]
        counters = self.counters
        return EngineStats(
            slots=self.config.slots,
            active=int(self.table.active.sum()),
            queued=sum(len(group.pending) for group in tuple(self.queue)),
            paused=self.paused,
            version=self.version,
            cache_epoch=self.cache_epoch,
            generated_tokens=counters.generated_tokens,
            prompt_tokens=counters.prompt_tokens,
            steps=counters.steps,
            busy_seconds=counters.busy_seconds,
            forward_seconds=counters.forward_seconds,
            prefilled_tokens=counters.prefilled_tokens,
            tokens_per_second=sum(n for _, n in recent[1:]) / elapsed if elapsed > 0 else 0.0,
        )

    # Admission

    def _admit(self) -> None:
        free = self.table.free()
        waiting = min(sum(len(group.pending) for group in self.queue), self.config.slots)
        if not waiting or len(free) < min(waiting, self._worth_admitting()):
            return
        placed = self._place(free)
        for group, slots in placed:
            if group.prefix is not None and group.prefix.logits is not None:
                self._start([(group, slots)], group.prefix.logits.unsqueeze(0), group.prefix.kv.unsqueeze(1))
        new = [item for item in placed if item[0].prefix is None and item[0].part is None]
        for members, logits, kv in self._prefill([group.sequence for group, _ in new]):
            self._start([new[i] for i in members], logits, kv)
        begun = [item for item in placed if item[0].prefix is None and item[0].part is not None]
        for members, logits, kv in self._extend([group for group, _ in begun]):
            self._start([begun[i] for i in members], logits, kv)
        if placed:
            self.queue = deque(group for group in self.queue if group.pending)

    def _place(self, free: Slots) -> list[tuple[Group, Slots]]:
        """Slots for the groups that wait. Of a long prompt only a part is computed now, and a slot
        stays free for it."""
        placed: list[tuple[Group, Slots]] = []
        computing = False
        for group in self.queue:
            if not len(free):
                break
            self._look_up(group)
            if self._is_long(group):
                if not computing:
                    self._compute_part(group)
                computing, free = True, free[:-1]
                continue
            count = min(len(group.pending), len(free))
            placed.append((group, free[:count]))
            free = free[count:]
        return placed

    def _look_up(self, group: Group) -> None:
        """Find what the cache has of a prompt. Deterministic mode uses only whole prompts, because
        the bits of a prompt in parts are others."""
        if group.prefix is not None or group.part is not None:
            return
        if self.config.deterministic:
            group.prefix = self.prefixes.whole(group.sequence)
            group.cached = 0 if group.prefix is None else len(group.sequence)
        elif self.forward.extends and (found := self.prefixes.find(group.sequence)) is not None:
            prefix, count = found
            group.cached = min(count, len(group.sequence) - 1)
            group.part = Part(prefix.kv.unsqueeze(1), group.cached)

    def _is_long(self, group: Group) -> bool:
        done = 0 if group.part is None else group.part.count
        return self.forward.extends and group.prefix is None and len(group.sequence) - done > self.config.chunk_tokens

    def _compute_part(self, group: Group) -> None:
        """Compute the next part of a long prompt."""
        sequence, done = group.sequence, 0 if group.part is None else group.part.count
        if group.part is None or group.part.kv.shape[2] < len(sequence):
            kv = self._empty(1, len(sequence))
            if group.part is not None:
                kv[:, :, :done] = group.part.kv[:, :, :done]
            group.part = Part(kv, done)
        end = done + self.config.chunk_tokens
        self._pass_over([sequence[done:end]], [done], group.part.kv[:, :, :end])
        group.part.count = end

    def _extend(self, groups: Sequence[Group]) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Compute the rest of prompts of which a part is known. Yields like ``_prefill``."""
        parts = [group.part for group in groups if group.part is not None]
        starts, lengths = [part.count for part in parts], [len(group.sequence) for group in groups]
        most = 1 if self.config.deterministic else self.config.prefill_tokens
        for members in by_part(starts, lengths, most):
            begin = [starts[i] for i in members]
            new = [groups[i].sequence[starts[i] :] for i in members]
            kv = self._empty(len(members), max(begin) + max(map(len, new)))
            for row, i in enumerate(members):
                kv[:, row, : starts[i]] = parts[i].kv[:, 0, : starts[i]]
            yield members, self._pass_over(new, begin, kv), kv[:, :, : self.config.max_len]

    def _pass_over(self, new: Sequence[NDArray[np.int64]], starts: Sequence[int], kv: Tensor) -> Tensor:
        """Compute tokens that follow ``starts`` tokens, and write their KV. Returns the last
        logits."""
        lengths = np.array([len(row) for row in new])
        ids = np.zeros((len(new), lengths.max()), np.int64)
        for row, tokens in enumerate(new):
            ids[row, : len(tokens)] = tokens
        with self._forward_clock():
            logits = self.forward.extend(self._tensor(ids), self._tensor(np.array(starts)), self._tensor(lengths), kv)
        self.counters.prefilled_tokens += int(lengths.sum())
        return logits

    def _empty(self, rows: int, length: int) -> Tensor:
        shape = self.forward.shape
        return torch.zeros((shape.layers, rows, length, 2, shape.heads, shape.dim), dtype=shape.dtype, device=self.device)

    def _worth_admitting(self) -> int:
        """The number of free slots for which a prefill pass is worthwhile, because a pass for one
        prompt takes nearly as long as one for several."""
        return max(1, self.config.slots // 16)

    def _prefill(self, sequences: list[NDArray[np.int64]]) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Run sequences. Yields for each batch the indices of its sequences (one per row), last
        logits [rows, V], and KV [layers, rows, T, 2, heads, dim]."""
        config = self.config
        batches = by_bucket(sequences, config.max_len) if config.deterministic else by_size(sequences, config.prefill_tokens)
        for members, ids, lengths in batches:
            with self._forward_clock():
                logits, kv = self.forward.prefill(self._tensor(ids), self._tensor(lengths))
            self.counters.prefilled_tokens += int(lengths[: len(members)].sum())
            yield members, logits, kv

    def _start(self, placed: list[tuple[Group, Slots]], logits: Tensor, kv: Tensor) -> None:
        """Give samples their slots, the KV of their prompt, and their first token. Row i of logits
        and kv is the prompt of placed[i]."""
        for row, (group, _) in enumerate(placed):
            if len(group.pending) == len(group.request.seeds):
                self.counters.prompt_tokens += len(group.sequence)
            if group.prefix is None:
                self._keep(group, logits[row], kv[:, row, : len(group.sequence)])
        for _, alike in groupby(placed, lambda item: (item[0].request.params, item[0].stop_ids)):
            self._occupy(list(alike))
        slots = np.concatenate([slots for _, slots in placed])
        counts = [len(slots) for _, slots in placed]
        rows = self._tensor(np.repeat(np.arange(len(placed)), counts))
        self.cache.spread(slots, counts, kv[:, : len(placed)])
        self._sample(slots, logits[rows], self.table.controls(slots, self.device))

    def _keep(self, group: Group, logits: Tensor, kv: Tensor) -> None:
        """Keep a computed prompt for later requests, and for the samples of its group that wait."""
        deterministic = self.config.deterministic
        group.prefix = Prefix(group.sequence, kv.clone(), logits.clone()) if len(group.request.seeds) > 1 else None
        if group.reusable and (deterministic or self.forward.extends):
            self.prefixes.keep(group.sequence, kv, logits if deterministic else None)

    def _occupy(self, placed: list[tuple[Group, Slots]]) -> None:
        """Give slots to samples of groups with the same parameters and end tokens."""
        request = placed[0][0].request
        owners: list[Sample] = []
        seeds: list[int] = []
        for group, slots in placed:
            for _ in range(len(slots)):
                index = group.pending.popleft()
                text = group.text or (SampleText(request.params.stop, request.params.min_tokens) if group.watched else None)
                match = None if group.match is None else group.match.copy()
                owners.append(Sample(group, index, text, self.cache_epoch, match))
                seeds.append(group.request.seeds[index])
        counts = [len(slots) for _, slots in placed]
        prompts = np.repeat([len(group.sequence) for group, _ in placed], counts)
        limits = np.repeat([self._limit(group) for group, _ in placed], counts)
        self.table.occupy(
            np.concatenate([slots for _, slots in placed]), owners, prompts, seeds, request.params, limits, placed[0][0].stop_ids
        )
        for group, slots in placed:
            if len(group.continued):
                self.table.resume(int(slots[0]), group.continued)

    def _recompute(self, slots: Slots) -> None:
        """Recompute the KV of these slots from their tokens."""
        sequences = [
            np.concatenate(
                (self.table.owner[s].group.prompt, self.table.out_tokens[s, : self.table.generated[s] - 1].astype(np.int64))
            )
            for s in slots.tolist()
        ]
        for members, _, kv in self._prefill(sequences):
            self.cache.write(self._tensor(slots[members]), kv[:, : len(members)])

    # Steps

    def _arrange(self) -> None:
        """Sort samples by length and move them to the lowest slots if that is worth the copies."""
        table, config = self.table, self.config
        extent = table.extent()
        if not extent:
            return
        positions, active = table.positions[:extent], table.active[:extent]
        used, block = int(active.sum()), config.block
        empty = -(-extent // block) > -(-used // block) if config.deterministic else 32 * (extent - used) >= extent
        due = self.forward.splits and (config.deterministic or self.counters.steps % _SORT_EVERY == 0)
        if (empty and extent > used) or (due and is_scattered(segments(positions, active, config.max_len))):
            source, target = moves(positions, active, config.max_len)
            self.cache.move(self._tensor(source), self._tensor(target), int(positions[source].max()))
            table.move(source, target)

    def _step(self) -> None:
        table, config = self.table, self.config
        extent = table.extent()
        if not extent:
            return
        if config.deterministic:
            logits = torch.cat([self._decode(i, i + config.block) for i in range(0, extent, config.block)])[:extent]
        else:
            logits = self._decode(0, extent)
        self.counters.steps += 1
        self._sample(table.rows(extent), logits, table.step_controls(extent, self.device))

    def _decode(self, start: int, stop: int) -> Tensor:
        """Logits [stop - start, V] for the next tokens of the slots [start, stop)."""
        table, config = self.table, self.config
        tokens, positions = table.tokens[start:stop], table.positions[start:stop]
        if not self.forward.splits:
            reads = [Segment(0, stop - start, config.max_len if config.deterministic else int(positions.max()) + 1)]
        elif config.deterministic:
            reads = segments(positions, table.active[start:stop], config.max_len)
        else:
            reads = loose_segments(positions, config.max_len)
        cache = self.cache.block(start, stop)
        with self._forward_clock():
            return self.forward.decode(self._tensor(tokens), self._tensor(positions), cache, reads)

    @contextmanager
    def _forward_clock(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.counters.forward_seconds += time.perf_counter() - started

    def _sample(self, slots: Slots, logits: Tensor, controls: Controls) -> None:
        """Draw the next token of these slots from logits [len(slots), V], and finish the samples
        that ended."""
        table = self.table
        edits = controls.edits
        edited = None if edits is None else edits.apply(logits, table.sampled_so_far(slots[edits.at]))
        picked = sample(logits, self._tensor(table.uniform(slots)), controls, edited)
        table.record(slots, picked)
        for (rows, _), (values, tokens) in zip(controls.top, picked.top, strict=True):
            for slot, *best in zip(slots[rows.cpu().numpy()].tolist(), values.cpu().numpy(), tokens.cpu().numpy(), strict=True):
                table.owner[slot].top.append(tuple(best))
        slots = slots[table.active[slots]]
        self.counters.generated_tokens += len(slots)
        bad, stopped, full = table.finished(slots)
        complete = np.empty(0, np.int64)
        if edits is not None and edits.matches:
            complete = self._match(slots, bad, stopped, full)
            full = np.union1d(full, complete)
        watched = slots[table.watched[slots]]
        if len(watched):
            stopped, full = self._read(watched, bad, stopped, full)
        if len(complete):
            stopped, full = np.concatenate((stopped, np.intersect1d(full, complete))), np.setdiff1d(full, complete)
        if len(bad):
            self.cache.clear(self._tensor(bad))
            self._finish(bad, "error", NonFiniteLogits("the model's logits are not finite; check the weights of this version"))
        self._finish(stopped, "stop")
        self._finish(full, "length")

    def _match(self, slots: Slots, bad: Slots, stopped: Slots, full: Slots) -> Slots:
        """Add the new tokens of samples with a constraint. Returns the slots whose text is complete
        and that sample no end token."""
        ended = {*bad.tolist(), *stopped.tolist()}
        complete: list[int] = []
        for slot in slots.tolist():
            owner = self.table.owner[slot]
            if owner.match is None or slot in ended:
                continue
            owner.match.take([int(self.table.tokens[slot])])
            if owner.match.complete and (slot in full or not self._has_end(owner.group)):
                complete.append(slot)
        return np.array(complete, np.int64)

    def _read(self, watched: Slots, bad: Slots, stopped: Slots, full: Slots) -> tuple[Slots, Slots]:
        """Decode the new tokens of samples that need text, send deltas, and move samples at a stop
        string to ``stopped``."""
        table, tokenizer = self.table, self._text_of()
        failed = set(bad.tolist())
        silent = failed | set(stopped.tolist())  # the end token has no text
        ending = silent | set(full.tolist())
        owners = {slot: table.owner[slot] for slot in watched.tolist()}
        for slot, owner in owners.items():
            if slot not in silent:
                owner.text.push(int(table.tokens[slot]))
        for final in (False, True):
            texts = [owner.text for slot, owner in owners.items() if (slot in ending) == final]
            if texts:
                advance(texts, tokenizer, final)
        matched = np.array([s for s, owner in owners.items() if owner.text.matched and s not in silent], np.int64)
        for slot, owner in owners.items():
            if owner.group.request.stream and slot not in failed:
                end = int(table.generated[slot])
                owner.group.sink.put(self._delta(slot, owner, end - 1, end, owner.text.settled_text()))
        return np.concatenate((stopped, matched)), np.setdiff1d(full, matched)

    def _delta(self, slot: int, owner: Sample, start: int, end: int, text: str) -> SampleDelta:
        table, new = self.table, np.s_[slot, start:end]
        return SampleDelta(
            request_id=owner.group.request.request_id,
            sample=owner.index,
            start=start - owner.begin,
            token_ids=table.out_tokens[new].copy(),
            logprobs=table.out_logprobs[new].copy(),
            raw_logprobs=table.out_raw_logprobs[new].copy(),
            text=text,
            version=self.version,
            top_logprobs=owner.top_logprobs(start - owner.begin, end - owner.begin),
        )

    def _finish(self, slots: Slots, reason: FinishReason, error: EngineError | None = None) -> None:
        """Deliver these samples and free their slots. The last token of a sample that ends with
        ``NonFiniteLogits`` is dropped."""
        if not len(slots):
            return
        table = self.table
        ends = (table.generated[slots] - isinstance(error, NonFiniteLogits)).tolist()
        sampled = table.sampled(slots, ends)
        for slot, end, (tokens, logprobs, raw) in zip(slots.tolist(), ends, sampled, strict=True):
            owner = table.owner[slot]
            owner.close_span(self.version, end)
            group = owner.group
            if error is None and group.reusable:
                self._keep_sample(slot, owner)
            if group.request.stream and (rest := owner.text.remaining_text()):
                group.sink.put(self._delta(slot, owner, end, end, rest))
            group.deliver(
                SampleOutput(
                    request_id=group.request.request_id,
                    sample=owner.index,
                    token_ids=tokens[owner.begin :],
                    logprobs=logprobs[owner.begin :],
                    raw_logprobs=raw[owner.begin :],
                    version_spans=tuple(owner.spans),
                    finish_reason=reason,
                    error=error,
                    text=None if owner.text is None else owner.text.text[owner.text.start :],
                    stop_string=None if owner.text is None else owner.text.matched,
                    top_logprobs=owner.top_logprobs(0, end - owner.begin),
                    cached_tokens=group.cached,
                )
            )
            if not group.left:
                del self.groups[group.request.request_id]
        table.release(slots)

    def _keep_sample(self, slot: int, owner: Sample) -> None:
        """Keep the KV of a finished sample, if all of it is of the current weights."""
        if owner.epoch != self.cache_epoch or self.config.deterministic or not self.forward.extends or self._parked is not None:
            return
        known = int(self.table.positions[slot])  # the last token has no KV
        group, new = owner.group, known - len(owner.group.prompt)
        tokens = np.concatenate((group.prompt, self.table.out_tokens[slot, :new].astype(np.int64)))
        self.prefixes.keep(tokens, self.cache.data[:, slot, :known])

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        """The array on the model's device; on the CPU it shares the array's memory."""
        return torch.from_numpy(array).to(self.device)
