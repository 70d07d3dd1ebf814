"""Changes to the logits of a step's rows before the temperature: bias, tokens that may not end a
sample yet, constraints, and penalties, in the order of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout_workers.engines.base import SamplingParams
from rollout_workers.engines.transformers.constraint import Match

if TYPE_CHECKING:
    from rollout_workers.engines.transformers.sample import Sample

Ints = NDArray[np.int64]


class Edited(NamedTuple):
    """The changed logits [E, V] of ``rows`` int64[E]."""

    rows: Tensor
    logits: Tensor


class Places(NamedTuple):
    """Entries of a matrix [E, V]: rows int64[N], tokens int64[N]."""

    rows: Tensor
    tokens: Tensor


class Sampled(NamedTuple):
    """The tokens of E samples. tokens int64[E, T], counts int64[E]: of them belong to the
    sample."""

    tokens: Ints
    counts: Ints


@dataclass(frozen=True, slots=True)
class Edits:
    """What changes in E of a step's rows.

    rows, at int64[E]: indices of the rows, on the device and on the host. bias, bias_values
    f32[N]: added. ends, least int64[E]: tokens that end a sample, which must have ``least`` tokens
    first. prompts: tokens of the prompts of rows with a repetition penalty. penalties f32[3, E, 1]:
    repetition, presence, frequency; None: none has one. matches: of rows with a constraint.
    """

    rows: Tensor
    at: Ints
    bias: Places
    bias_values: Tensor
    ends: Places
    least: Ints
    prompts: Places
    penalties: Tensor | None
    matches: tuple[tuple[int, Match], ...]

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Whether these parameters change logits."""
        return bool(
            params.logit_bias
            or params.constraint
            or params.min_tokens
            or (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
        )

    @classmethod
    def of(cls, at: Ints, samples: Sequence[Sample], vocabulary: int, device: torch.device) -> Edits:
        """The edits of ``samples``, which are at the indices ``at`` int64[E] of the step."""
        params = [sample.group.request.params for sample in samples]
        penalties = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params]
        biases = [[token for token, _ in p.logit_bias] for p in params]
        ends = [[i for i in s.group.stop_ids if i < vocabulary] if s.group.request.params.min_tokens else [] for s in samples]
        prompts = [np.unique(s.group.prompt) if p.repetition_penalty != 1 else [] for s, p in zip(samples, params, strict=True)]
        values = np.array([value for p in params for _, value in p.logit_bias], np.float32)
        penalized = any(p != (1, 0, 0) for p in penalties)
        return cls(
            rows=torch.from_numpy(at).to(device),
            at=at,
            bias=_places(biases, device),
            bias_values=torch.from_numpy(values).to(device),
            ends=_places(ends, device),
            least=np.array([p.min_tokens for p in params], np.int64),
            prompts=_places(prompts, device),
            penalties=torch.tensor(penalties, device=device).T[..., None] if penalized else None,
            matches=tuple((row, sample.match) for row, sample in enumerate(samples) if sample.match is not None),
        )

    def apply(self, logits: Tensor, sampled: Sampled) -> Edited:
        """Changed copies of the rows of logits [B, V], of samples with the tokens ``sampled`` so
        far."""
        found = logits[self.rows].float()
        if len(self.bias_values):
            found.index_put_(self.bias, self.bias_values, accumulate=True)
        for row, match in self.matches:
            found[row].masked_fill_(torch.from_numpy(~match.allowed()).to(found.device), -torch.inf)
        early = torch.from_numpy(sampled.counts < self.least).to(logits.device)[self.ends.rows]
        if early.any():
            before = found.clone() if self.matches else found
            found[self.ends.rows[early], self.ends.tokens[early]] = -torch.inf
            for row, _ in self.matches:
                if not (found[row] > -torch.inf).any():  # the text is complete
                    found[row] = before[row]
        if self.penalties is not None:
            found = self._penalized(found, sampled, self.penalties)
        return Edited(self.rows, found)

    def _penalized(self, logits: Tensor, sampled: Sampled, penalties: Tensor) -> Tensor:
        repetition, presence, frequency = penalties
        tokens = torch.from_numpy(sampled.tokens).to(logits.device)
        counted = torch.from_numpy(np.arange(tokens.shape[1]) < sampled.counts[:, None]).to(logits)
        counts = torch.zeros_like(logits).scatter_add_(1, tokens, counted)
        occurs = counts > 0
        seen = occurs.index_put(self.prompts, torch.ones((), dtype=torch.bool, device=logits.device))
        logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
        return logits - frequency * counts - presence * occurs


def _places(tokens: Sequence[Sequence[int] | Ints], device: torch.device) -> Places:
    rows = np.repeat(np.arange(len(tokens)), [len(row) for row in tokens])
    flat = np.concatenate([np.asarray(row, np.int64) for row in tokens]) if len(rows) else np.empty(0, np.int64)
    return Places(torch.from_numpy(rows).to(device), torch.from_numpy(flat).to(device))
