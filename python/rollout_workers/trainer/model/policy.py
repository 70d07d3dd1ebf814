"""The policy: a causal language model that computes the logprobs of a micro-batch's trained
tokens."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from rollout_workers.trainer.distributed.loading import adapters_of, fill, on_meta, standing_in
from rollout_workers.trainer.distributed.ranks import ALONE, Ranks
from rollout_workers.trainer.distributed.shards import whole
from rollout_workers.trainer.model import fused
from rollout_workers.trainer.model.adapter import Adapter, LoraConfig
from rollout_workers.trainer.model.freezing import checkpoint_gradients, freeze
from rollout_workers.trainer.model.logprob import LOGITS_LIMIT, logit_logprobs, token_logprobs, top_logprobs
from rollout_workers.trainer.model.tree_attention import install, installed
from rollout_workers.trainer.model.tree_layout import tree_layout
from rollout_workers.trainer.packing import MicroBatch, pack
from rollout_workers.trainer.types import TrainSample
from rollout_workers.weights import LiveWeights
from rollout_workers.weights.head import plain_head
from rollout_workers.weights.pretrained import load_whole

log = logging.getLogger(__name__)

PROBE = 48  # tokens
NO_MASK = torch.zeros(1, 1, 1, 1)  # models use a mask of four dimensions as it is
# The largest difference between logprobs of two computations that count as equal.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The result of a forward pass for N trained tokens and M predicting positions."""

    tokens: Tensor
    """float32 [N], with gradient if gradients are enabled."""
    entropy: Tensor
    """float32 [M]: the entropy in nats at each predicting position, with gradient if gradients are
    enabled."""
    hidden: Tensor | None = None
    """[M, H]: the last hidden state at each predicting position, with gradient; None unless
    requested."""


class Policy:
    """A Hugging Face causal model with the optimizations that are valid for it.

    Two optimizations are compared with plain calls of the model when it is loaded, and used only if
    they give the same: prefix trees (``share_prefixes``; not with recurrent or windowed layers),
    and logprobs directly from the hidden states (``linear_head``; not if the model scales or caps
    its logits, see ``plain_head``). Dropout is off.
    """

    _live: LiveWeights | None = None  # created on first use, after adapters and sharding

    def __init__(self, model: PreTrainedModel, ranks: Ranks = ALONE, files: Mapping[str, Tensor] | None = None) -> None:
        """ranks: with several, call ``shard`` before anything else. files: the values of a model on
        the meta device."""
        self.model = model.eval()
        self.adapter: Adapter | None = None
        self._files = files
        self._inside = ALONE.shard(model)
        self.linear_head = self.share_prefixes = False
        if files is None:
            fused.install(model)
        if ranks.size == 1:
            self._probe(ranks)

    def _probe(self, ranks: Ranks) -> None:
        """Choose the optimizations, on the device that trains. Every rank must call it."""
        model = self.model

        def agrees(*, share_prefixes: bool) -> bool:
            return all(ranks.exchange(self._agrees(share_prefixes=share_prefixes)))

        with torch.no_grad():
            self.linear_head = all(ranks.exchange(self._inside(plain_head, model)))
        self.share_prefixes = True
        self.linear_head = self.linear_head and agrees(share_prefixes=False)
        if not self.linear_head:
            log.info("%s computes its own logits: all of them are in memory, tokens x vocabulary", type(model).__name__)
        self.share_prefixes = attends_everywhere(model.config) and install(model, lambda: agrees(share_prefixes=True))

    @classmethod
    def load(
        cls,
        directory: str | os.PathLike[str],
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device | None = None,
        ranks: Ranks = ALONE,
    ) -> Policy:
        """Load a folder in the Hugging Face layout. device: None is the GPU if there is one, else
        the CPU. ranks: with several, the tensors are read by ``shard``."""
        if ranks.size > 1 and (found := on_meta(AutoModelForCausalLM, directory, dtype)) is not None:
            return cls(found[0], ranks, found[1])
        return cls(cls.load_model(directory, dtype=dtype, device=device or ranks.loading_device), ranks)

    @staticmethod
    def load_model(
        directory: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32, device: str | torch.device | None = None
    ) -> PreTrainedModel:
        """The model of ``load``. Raises ``WeightsIncomplete``."""
        transformers_logging.disable_progress_bar()
        model: Any = load_whole(AutoModelForCausalLM, directory, dtype=dtype)
        return model.to(device or ALONE.loading_device)

    @classmethod
    def prepare(
        cls,
        directory: str | os.PathLike[str],
        *,
        dtype: torch.dtype = torch.float32,
        lora: LoraConfig | None = None,
        frozen: Sequence[str] = (),
        checkpointing: bool = False,
        seed: int = 0,
        ranks: Ranks = ALONE,
    ) -> Policy:
        """Load a model for training. Raises ``BadSettings`` if the settings do not fit it."""
        policy = cls.load(directory, dtype=dtype, ranks=ranks)
        if checkpointing:
            checkpoint_gradients(policy.model)
        freeze(policy.model, frozen)
        if lora is not None:
            with standing_in(policy.model):
                policy.adapter = Adapter(policy.model, lora, seed=seed)
        return policy

    def config_folder(self, model_dir: Path) -> Path:
        """The folder whose config and tokenizer belong to the policy's tensors."""
        return model_dir

    def shard(self, ranks: Ranks) -> None:
        """Keep this rank's part. Call it after adapters and freezing; from then on all ranks must
        make the same calls."""
        model, files, self._files = self.model, self._files, None
        adapters = {} if files is None else adapters_of(model, files)

        def read() -> None:
            assert files is not None
            fill(model, files, adapters)
            fused.install_by_block(model)

        self._inside = ranks.shard(model, None if files is None else read)
        self._live = None
        if ranks.size > 1:
            self._probe(ranks)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The complete weights under their Hugging Face names, with adapters merged."""
        if self.adapter is not None:
            return self.adapter.merged()
        if self._live is None:
            self._live = LiveWeights(self.model)
        return ((name, whole(tensor)) for name, tensor in self._live)

    def logprobs(self, batch: MicroBatch, *, temperature: float = 1.0, hidden: bool = False) -> Logprobs:
        """Logprobs of a micro-batch's trained tokens at ``temperature``. hidden: also return the
        hidden states."""
        return Logprobs(*self._inside(self._logprobs, batch, temperature, hidden))

    def _logprobs(self, batch: MicroBatch, temperature: float, hidden: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """The fields of ``Logprobs``."""
        device = self.model.device
        predictors, predictor, target = (
            torch.from_numpy(array).to(device) for array in (batch.predictors, batch.predictor, batch.target)
        )
        if not self.linear_head:
            output = self._call(self.model, batch, output_hidden_states=hidden)
            logits = output.logits.flatten(0, 1)
            tokens, entropy = logit_logprobs(logits, predictors, predictor, target, temperature=temperature)
            states = output.hidden_states[-1].flatten(0, 1).index_select(0, predictors) if hidden else None
            return tokens, entropy, states
        states = self._call(self.model.base_model, batch).last_hidden_state.flatten(0, 1).index_select(0, predictors)
        head: Any = self.model.get_output_embeddings()
        tokens, entropy = token_logprobs(states, head.weight, head.bias, predictor, target, temperature=temperature)
        return tokens, entropy, states if hidden else None

    @torch.no_grad()
    def top(self, batch: MicroBatch, k: int, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """The k most likely tokens at each predicting position of a micro-batch, int64 [M, k], and
        their logprobs at ``temperature``, float32 [M, k]."""
        return self._inside(self._top, batch, k, temperature)

    def _top(self, batch: MicroBatch, k: int, temperature: float) -> tuple[Tensor, Tensor]:
        predictors = torch.from_numpy(batch.predictors).to(self.model.device)
        step = max(1, LOGITS_LIMIT // self.model.config.get_text_config().vocab_size)
        if not self.linear_head:
            logits = self._call(self.model, batch).logits.flatten(0, 1)
            return top_logprobs(lambda rows: logits[predictors[rows]], len(predictors), k, temperature=temperature, step=step)
        states = self._call(self.model.base_model, batch).last_hidden_state.flatten(0, 1).index_select(0, predictors)
        head: Any = self.model.get_output_embeddings()
        logits_of = lambda rows: torch.nn.functional.linear(states[rows], head.weight, head.bias)  # noqa: E731
        return top_logprobs(logits_of, len(predictors), k, temperature=temperature, step=step)

    def _call(self, module: torch.nn.Module, batch: MicroBatch, **options: bool) -> Any:
        return call_packed(module, batch, device=self.model.device, dtype=self.model.dtype, **options)

    def _logits(self, token_ids: Tensor) -> Tensor:
        """[B, T, V]: the logits of a plain call."""
        return self.model(input_ids=token_ids, use_cache=False).logits

    @torch.no_grad()
    def _agrees(self, *, share_prefixes: bool) -> bool:
        """Whether the current optimizations give the logprobs of a plain call, on four short
        sequences."""
        samples = probe_samples(self.model.config.get_text_config().vocab_size)
        try:
            (batch,) = pack(samples, range(len(samples)), tokens=1 << 20, share_prefixes=share_prefixes)
            found = torch.full((len(samples), len(samples[0].token_ids)), torch.nan)
            found[batch.sample, batch.place] = self.logprobs(batch).tokens.float().cpu()
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return False
        token_ids = torch.from_numpy(np.stack([sample.token_ids for sample in samples])).long()
        logits = self._inside(self._logits, token_ids.to(self.model.device)).float().cpu()
        wanted = logits[:, :-1].log_softmax(-1).gather(-1, token_ids[:, 1:, None])[..., 0]
        return bool(((found[:, 1:] - wanted).abs().max() < TOLERANCE[self.model.dtype]).item())


def call_packed(module: Any, batch: MicroBatch, *, device: torch.device, dtype: torch.dtype, **options: Any) -> Any:
    """Call a Hugging Face module on the rows of a micro-batch, sequences or prefix trees."""
    token_ids = torch.from_numpy(batch.token_ids).to(device)
    if batch.subtree_end is None:
        return module(input_ids=token_ids, use_cache=False, **options)
    tree = tree_layout(batch.subtree_end, batch.sizes, device) if installed(module) else None
    if tree is not None:
        options["tree"] = tree
    return module(
        input_ids=token_ids,
        position_ids=torch.from_numpy(batch.positions).to(device),
        attention_mask=tree_mask(torch.from_numpy(batch.subtree_end).to(device), dtype) if tree is None else NO_MASK,
        use_cache=False,
        **options,
    )


def tree_mask(subtree_end: Tensor, dtype: torch.dtype) -> Tensor:
    """The additive attention mask of prefix trees: 0 if ``j <= i < subtree_end[j]``, else the
    lowest number.

    subtree_end: int64 [B, T]. Returns dtype [B, 1, T, T], rows i, columns j.
    """
    place = torch.arange(subtree_end.shape[1], device=subtree_end.device)
    visible = (place[:, None] >= place) & (place[:, None] < subtree_end[:, None, :])
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]


def attends_everywhere(config: PreTrainedConfig) -> bool:
    """Whether every layer attends to the whole sequence. A test of short sequences would not reveal
    a window."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    local = "local" in (getattr(text, "attention_layers", None) or ())  # GPT-Neo
    return kinds == {"full_attention"} and not local and not getattr(text, "sliding_window", None)


def probe_samples(vocabulary: int) -> list[TrainSample]:
    """Four sequences with shared prefixes of different lengths, long enough for ``tree_layout`` to
    split their row."""
    generator = np.random.default_rng(0)
    stem = generator.integers(0, vocabulary, PROBE)
    samples = []
    for number, shared in enumerate((PROBE, 28, 28, 12)):
        token_ids = np.concatenate((stem[:shared], generator.integers(0, vocabulary, PROBE - shared))).astype(np.int32)
        mask = np.ones(PROBE, np.uint8)
        samples.append(TrainSample("probe", number, token_ids, 0, mask, np.zeros(PROBE, np.float32)))
    return samples
