"""The teacher: the model whose logprobs distillation trains on."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from rollout_workers.trainer.distributed.ranks import ALONE, Ranks
from rollout_workers.trainer.model.policy import Policy
from rollout_workers.trainer.packing import MicroBatch
from rollout_workers.trainer.types import BadSettings


class Teacher:
    """A model that is never trained, with the policy's tokenizer."""

    def __init__(self, directory: str | os.PathLike[str], policy: Policy, ranks: Ranks = ALONE) -> None:
        """Load ``directory``. Raises ``OSError`` if it cannot be loaded, ``BadSettings`` for
        another vocabulary."""
        self._policy = Policy.load(directory, dtype=policy.model.dtype, ranks=ranks)
        theirs, ours = (model.config.get_text_config().vocab_size for model in (self._policy.model, policy.model))
        if theirs != ours:
            raise BadSettings(
                f"the teacher in {os.fspath(directory)} has a vocabulary of {theirs} tokens, the model one of {ours}; "
                "use a teacher with the same tokenizer"
            )

    def shard(self, ranks: Ranks) -> None:
        """Keep this rank's part."""
        self._policy.shard(ranks)

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch, *, temperature: float = 1.0) -> Tensor:
        """float32 [N]: logprobs of a micro-batch's trained tokens."""
        return self._policy.logprobs(batch, temperature=temperature).tokens

    def top(self, batch: MicroBatch, k: int, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """``Policy.top`` of the teacher."""
        return self._policy.top(batch, k, temperature=temperature)
