"""Losses over labeled completions: KTO."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from rollout_workers.algorithms import UnpairedBatch
from rollout_workers.algorithms.kto import mismatch, reference_point
from rollout_workers.trainer.objective.base import Models, Part, sequence_sums, trained_lengths
from rollout_workers.trainer.packing import MicroBatch
from rollout_workers.trainer.types import BadBatch, TrainSample


class Unpaired:
    """One step over labeled completions: a reward above 0 means desirable."""

    def __init__(self, models: Models, samples: Sequence[TrainSample], step: int) -> None:
        self._models, self._samples = models, samples
        lengths = trained_lengths(samples)
        empty = next((sample for sample, length in zip(samples, lengths, strict=True) if not length), None)
        if empty is not None:
            raise BadBatch(f"step {step}: sample {empty.sample} of group {empty.group_key} has no token to train on")
        self._desirable = torch.tensor([sample.reward > 0 for sample in samples])
        self._reference = models.cache.totals(models, samples).float()
        self._point = 0.0
        if models.algorithm.needs.mismatched:
            others = mismatch([sample.token_ids[: sample.prompt_length].tobytes() for sample in samples])
            crossed = [_crossed(samples[i], samples[j]) for i, j in enumerate(others)]
            self._point = reference_point(models.totals(crossed), models.totals(crossed, reference=True))
        self.metrics: dict[str, float] = {"tokens/trained": float(lengths.sum())}

    def updates(self) -> Iterator[list[MicroBatch]]:
        """One update."""
        yield self._models.pack(self._samples, range(len(self._samples)))

    def advantages(self) -> Mapping[tuple[str, int], float]:
        """Empty: nothing was sampled."""
        return {}

    def part(self, batch: MicroBatch) -> Part:
        """The loss of the micro-batch's samples."""
        policy = self._models.policy.logprobs(batch, temperature=self._models.temperature)
        here = torch.from_numpy(np.unique(batch.sample))
        sums = sequence_sums(batch, policy.tokens, len(self._samples))[here]
        terms = self._models.algorithm.loss(
            UnpairedBatch(
                logprobs=sums,
                reference_logprobs=self._reference[here].to(sums.device),
                desirable=self._desirable[here].to(sums.device),
                reference_point=self._point,
                samples=float(len(self._samples)),
            )
        )
        return Part(terms.loss, len(here), terms.sums)


def _crossed(prompt: TrainSample, completion: TrainSample) -> TrainSample:
    """The prompt of one sample with the completion of another."""
    head, tail = prompt.prompt_length, completion.prompt_length
    ids = np.concatenate((prompt.token_ids[:head], completion.token_ids[tail:]))
    mask = np.concatenate((np.zeros(head, np.uint8), completion.loss_mask[tail:]))
    return dataclasses.replace(
        prompt, token_ids=ids.astype(np.int32), loss_mask=mask, logprobs=np.zeros(len(ids), np.float32), teacher_logprobs=None
    )
