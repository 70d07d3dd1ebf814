"""The slots: arrays with the state of every sample that is being decoded, so that a step's
bookkeeping is vectorized."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollout_workers.engines.base import SamplingParams
from rollout_workers.engines.transformers.edits import Edits, Sampled
from rollout_workers.engines.transformers.philox import uniforms
from rollout_workers.engines.transformers.sample import Sample
from rollout_workers.engines.transformers.sampler import Controls, Filters, Picked

Slots = NDArray[np.int64]
_RANDOM_BLOCK = 16


class SlotTable:
    """Arrays over slots. A slot is free or has one sample; a free slot has position 0 and token 0.

    tokens: the last token, which is the next step's input. positions: where the KV of that token is
    written. generated: number of tokens so far. limit: maximum number of tokens. out_*: the sampled
    tokens, in the first ``generated`` columns.
    """

    def __init__(self, slots: int, rows: int, max_len: int, vocabulary: int) -> None:
        """``rows`` >= slots: rows of the model's passes. The rows after the slots are always
        free."""
        self.slots = slots
        self.vocabulary = vocabulary
        self.owner: list[Sample | None] = [None] * slots
        self.active = np.zeros(rows, bool)
        self.watched = np.zeros(slots, bool)
        self.tokens = np.zeros(rows, np.int64)
        self.positions = np.zeros(rows, np.int64)
        self.generated = np.zeros(slots, np.int64)
        self.limit = np.zeros(slots, np.int64)
        self.seeds = np.zeros(slots, np.uint64)
        self.temperature = np.ones(slots, np.float32)
        self.top_k = np.full(slots, vocabulary, np.int64)
        self.top_p = np.ones(slots, np.float32)
        self.min_p = np.zeros(slots, np.float32)
        self.edited = np.zeros(slots, bool)
        self.top = np.zeros(slots, np.int64)
        self.stop_ids = np.full((slots, 1), -1, np.int64)
        self.random = np.zeros((slots, _RANDOM_BLOCK))
        self.out_tokens = np.zeros((slots, max_len), np.int32)
        self.out_logprobs = np.zeros((slots, max_len), np.float32)
        self.out_raw_logprobs = np.zeros((slots, max_len), np.float32)
        self._rows = np.arange(slots)
        self._controls: tuple[int, Controls] | None = None

    def free(self) -> Slots:
        """The free slots, lowest first."""
        return np.flatnonzero(~self.active[: self.slots])

    def used(self) -> Slots:
        """The slots that have a sample, lowest first."""
        return np.flatnonzero(self.active)

    def extent(self) -> int:
        """One past the highest slot in use."""
        used = self.used()
        return int(used[-1]) + 1 if len(used) else 0

    def occupy(
        self,
        slots: Slots,
        owners: list[Sample],
        prompt_tokens: int | NDArray[np.int64],
        seeds: Sequence[int],
        params: SamplingParams,
        limit: int | NDArray[np.int64],
        stop_ids: tuple[int, ...],
    ) -> None:
        """Give free slots to samples that share parameters and end tokens. prompt_tokens, limit: of
        all, or of each [n].

        Their next token is the first one, which is sampled from the prompt's last logits.
        """
        for slot, owner in zip(slots.tolist(), owners, strict=True):
            self.owner[slot] = owner
        if len(stop_ids) > self.stop_ids.shape[1]:
            more = np.full((self.slots, len(stop_ids) - self.stop_ids.shape[1]), -1, np.int64)
            self.stop_ids = np.concatenate((self.stop_ids, more), axis=1)
        self.active[slots] = True
        self.watched[slots] = [owner.text is not None for owner in owners]
        self.positions[slots] = prompt_tokens - 1
        self.generated[slots] = 0
        self.limit[slots] = limit
        self.seeds[slots] = [seed & 0xFFFFFFFFFFFFFFFF for seed in seeds]
        self.temperature[slots] = params.temperature
        self.top_k[slots] = min(params.top_k or self.vocabulary, self.vocabulary)
        self.top_p[slots] = params.top_p
        self.min_p[slots] = params.min_p
        self.edited[slots] = Edits.needed(params)
        self.top[slots] = min(params.top_logprobs, self.vocabulary)
        self.stop_ids[slots] = -1
        self.stop_ids[slots, : len(stop_ids)] = stop_ids
        self._controls = None

    def resume(self, slot: int, tokens: NDArray[np.int64]) -> None:
        """Give an occupied slot the ``tokens`` that its sample has already, of which ``positions``
        counts the last as written."""
        count = len(tokens)
        self.out_tokens[slot, :count] = tokens
        self.generated[slot] = count
        block = np.array([count - count % _RANDOM_BLOCK])
        self.random[slot] = uniforms(self.seeds[slot : slot + 1], block, _RANDOM_BLOCK)

    def release(self, slots: Slots) -> None:
        """Free these slots."""
        for slot in slots.tolist():
            self.owner[slot] = None
        self.active[slots] = self.watched[slots] = False
        self.tokens[slots] = self.positions[slots] = self.generated[slots] = 0
        self.temperature[slots] = self.top_p[slots] = 1
        self.top_k[slots], self.min_p[slots] = self.vocabulary, 0
        self.edited[slots], self.top[slots] = False, 0
        self._controls = None

    def move(self, source: Slots, target: Slots) -> None:
        """Move samples simultaneously. Each target is free or a source. Sources that are not
        targets become free."""
        owners = [self.owner[slot] for slot in source.tolist()]
        for slot, owner in zip(target.tolist(), owners, strict=True):
            self.owner[slot] = owner
        for array in (
            *(self.active, self.watched, self.tokens, self.positions, self.generated, self.limit, self.seeds),
            *(self.temperature, self.top_k, self.top_p, self.min_p, self.stop_ids, self.random, self.edited, self.top),
            *(self.out_tokens, self.out_logprobs, self.out_raw_logprobs),
        ):
            array[target] = array[source]
        self.release(np.setdiff1d(source, target))
        self._controls = None

    def uniform(self, slots: Slots) -> NDArray[np.float64]:
        """The random number for each slot's next token, f64[n]. Numbers are drawn in advance in
        blocks that are aligned to the token's index."""
        generated = self.generated[slots]
        column = generated % _RANDOM_BLOCK
        due = slots[(column == 0) & self.active[slots]]
        if len(due):
            left = int((self.limit[due] - self.generated[due]).max())
            ahead = min(_RANDOM_BLOCK, left + left % 2)
            self.random[due, :ahead] = uniforms(self.seeds[due], self.generated[due], ahead)
        return self.random[slots, column]

    def record(self, slots: Slots, picked: Picked) -> None:
        """Append a sampled token to each slot of ``slots``. Free slots do not change."""
        tokens, logprobs, raw = (t.cpu().numpy() for t in (picked.tokens, picked.logprobs, picked.raw_logprobs))
        if len(slots) != int(self.active[slots].sum()):
            held = self.active[slots]
            slots, tokens, logprobs, raw = slots[held], tokens[held], logprobs[held], raw[held]
        at = self.generated[slots]
        self.out_tokens[slots, at] = tokens
        self.out_logprobs[slots, at] = logprobs
        self.out_raw_logprobs[slots, at] = raw
        self.tokens[slots] = tokens
        self.positions[slots] += 1
        self.generated[slots] = at + 1

    def finished(self, slots: Slots) -> tuple[Slots, Slots, Slots]:
        """Of active slots that just got a token: those with an invalid token, those at a stop
        token, those at their limit."""
        tokens = self.tokens[slots]
        raw = self.out_raw_logprobs[slots, self.generated[slots] - 1]
        bad = ~np.isfinite(raw)
        stopped = (tokens[:, None] == self.stop_ids[slots]).any(axis=1) & ~bad
        full = (self.generated[slots] >= self.limit[slots]) & ~bad & ~stopped
        return slots[bad], slots[stopped], slots[full]

    def sampled(self, slots: Slots, ends: Sequence[int]) -> Iterator[tuple[NDArray[Any], ...]]:
        """For each slot copies of its first ``ends`` tokens int32, logprobs, and raw logprobs
        float32.

        Slots of similar length share memory, which is freed with the last of them.
        """
        outputs, most = (self.out_tokens, self.out_logprobs, self.out_raw_logprobs), max(ends)
        if len(ends) * most > 2 * sum(ends):
            yield from (tuple(of[slot, :end].copy() for of in outputs) for slot, end in zip(slots, ends, strict=True))
            return
        copies = [of[slots, :most] for of in outputs]
        yield from (tuple(of[row, :end] for of in copies) for row, end in enumerate(ends))

    def rows(self, count: int) -> Slots:
        """The slots 0..count."""
        return self._rows[:count]

    def controls(self, slots: Slots, device: torch.device) -> Controls:
        """The sampling parameters of these slots as tensors."""
        temperature, top_k, top_p, min_p = (a[slots] for a in (self.temperature, self.top_k, self.top_p, self.min_p))
        greedy = temperature == 0
        tempered = (temperature != 1) & ~greedy
        filtered = ((top_k < self.vocabulary) | (top_p < 1) | (min_p > 0)) & ~greedy

        def tensor(array: NDArray[np.generic]) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        edited, top = np.flatnonzero(self.edited[slots]), self.top[slots]
        owners = [owner for slot in slots[edited].tolist() if (owner := self.owner[slot]) is not None]
        controls = Controls(
            edits=Edits.of(edited, owners, self.vocabulary, device) if len(edited) else None,
            top=tuple((tensor(np.flatnonzero(top == count)), count) for count in np.unique(top[top > 0]).tolist()),
            temperature=tensor(np.where(tempered, temperature, np.float32(1))[:, None]) if tempered.any() else None,
            greedy=tensor(greedy) if greedy.any() else None,
            shaped=tensor(tempered | filtered) if (tempered | filtered).any() else None,
        )
        if not filtered.any():
            return controls
        with np.errstate(divide="ignore"):
            log_min_p = np.log(min_p[filtered, None])
        arrays = (np.flatnonzero(filtered), top_k[filtered, None], top_p[filtered, None], log_min_p)
        return replace(controls, filters=Filters(*map(tensor, arrays)))

    def sampled_so_far(self, slots: Slots) -> Sampled:
        """The tokens of the samples in these slots."""
        counts = self.generated[slots]
        return Sampled(self.out_tokens[slots, : max(1, int(counts.max()))].astype(np.int64), counts)

    def step_controls(self, rows: int, device: torch.device) -> Controls:
        """``controls`` of slots 0..rows, cached until the slots' samples change."""
        if self._controls is None or self._controls[0] != rows:
            self._controls = (rows, self.controls(self.rows(rows), device))
        return self._controls[1]
