"""The critic of PPO: the value of the rest of a completion at each of its tokens."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel
from transformers.utils import logging as transformers_logging

from rollout_workers.trainer.distributed.loading import fill, on_meta
from rollout_workers.trainer.distributed.ranks import ALONE, Inside, Ranks
from rollout_workers.trainer.model import fused
from rollout_workers.trainer.model.freezing import checkpoint_gradients
from rollout_workers.trainer.model.policy import Policy, call_packed
from rollout_workers.trainer.packing import MicroBatch
from rollout_workers.weights.pretrained import load_whole


class Critic(nn.Module):
    """A scalar head, initially 0, on the policy's last hidden states or on a separate network.

    On the policy's hidden states (``on_policy``) the value loss also trains the policy's trunk, and
    one optimizer updates both. A separate network starts as a copy of the policy's trunk and has
    its own optimizer and learning rate.
    """

    _inside: Inside

    def __init__(
        self,
        policy: Policy,
        directory: str | os.PathLike[str] | None = None,
        *,
        checkpointing: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        """directory: the model's folder, for a separate network. checkpointing: gradient
        checkpointing of that network."""
        super().__init__()
        model: Any = policy.model
        self.trunk: Any = None
        self._files: Mapping[str, Tensor] | None = None
        if directory is not None:
            transformers_logging.disable_progress_bar()
            found = on_meta(AutoModel, directory, model.dtype) if ranks.size > 1 else None
            if found is not None:
                trunk, self._files = found
            else:
                trunk = load_whole(AutoModel, directory, dtype=model.dtype).to(ranks.loading_device)
                fused.install(trunk)
            self.trunk = trunk.eval()
            self.trunk.set_attn_implementation(model.config._attn_implementation)  # the one that was validated for the policy
            if checkpointing:
                checkpoint_gradients(self.trunk)
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1, device=model.device)
        self._zero_head()
        self._shard(ALONE)

    def shard(self, ranks: Ranks) -> None:
        """Keep this rank's part."""
        self._shard(ranks)

    def _shard(self, ranks: Ranks) -> None:
        fill = self._fill if ranks.size > 1 and self._files is not None else None
        self.__dict__["_inside"] = ranks.shard(self, fill)  # a plain attribute would register it as a submodule

    def _fill(self) -> None:
        assert self._files is not None
        fill(self.trunk, self._files, {})
        fused.install_by_block(self.trunk)
        self._zero_head()
        self._files = None

    def _zero_head(self) -> None:
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @property
    def on_policy(self) -> bool:
        """Whether the critic uses the policy's hidden states."""
        return self.trunk is None

    def values(self, batch: MicroBatch, hidden: Tensor | None) -> Tensor:
        """float32 [N], with gradient: the value before each trained token. hidden: [M, H], the
        policy's hidden states."""
        return self._inside(self._values, batch, hidden)

    def _values(self, batch: MicroBatch, hidden: Tensor | None) -> Tensor:
        predictor = torch.from_numpy(batch.predictor).to(self.head.weight.device)
        if self.trunk is not None:
            states = call_packed(self.trunk, batch, device=self.trunk.device, dtype=self.trunk.dtype).last_hidden_state.flatten(
                0, 1
            )
            hidden = states.index_select(0, torch.from_numpy(batch.predictors).to(states.device))
        assert hidden is not None
        return self.head(hidden.float())[predictor, 0]
