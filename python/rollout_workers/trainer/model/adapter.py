"""Low-rank adapters (PEFT) on frozen weights.

PEFT is imported by the first adapter: it takes seconds, and most runs train all weights.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollout.config.v1.run_config_pb2 import RunConfig
from rollout_workers.trainer.distributed.ranks import Ranks
from rollout_workers.trainer.distributed.shards import gathered, whole
from rollout_workers.trainer.types import BadSettings
from rollout_workers.weights import named_weights, streamed_digest
from rollout_workers.weights.store import ADAPTER_FILE, WeightsUnreadable
from rollout_workers.weights.tensor_file import read_tensors

NAME = "default"
_BASE = ".base_layer."
_ADAPTER = "lora_"
HEAD = "score"
"""The head of a sequence classifier. It is new, so the adapter includes it whole."""
_WHOLE = f".modules_to_save.{NAME}."
_UNTRAINED = ".original_module."


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Settings of the adapters (LoRA, arXiv 2106.09685; DoRA, arXiv 2402.09353), by the names of
    the run config.

    The weight of an adapted layer is ``W + (alpha / rank) B A``; with ``dora`` its rows are then
    scaled to a trained magnitude. ``targets`` are names of linear layers, such as ``q_proj``;
    empty: all except the head.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ()
    dora: bool = False

    @classmethod
    def of(cls, config: RunConfig) -> LoraConfig | None:
        """The settings of a run; None if it trains all weights."""
        if not config.HasField("lora"):
            return None
        lora = config.lora
        return cls(rank=lora.rank, alpha=lora.alpha, targets=tuple(lora.targets), dora=lora.dora)


class Adapter:
    """The adapters of one model, which is changed in place. Initially they do not change its
    output.

    The head of a sequence classifier is trained whole.
    """

    def __init__(self, model: PreTrainedModel, config: LoraConfig, *, seed: int = 0) -> None:
        """Freeze the model and add an adapter to each target.

        The same model, settings, and seed give the same adapters, independent of torch's random
        state. Raises ``BadSettings`` if a target is not a linear layer, or if PEFT does not support
        the combination.
        """
        import peft
        from peft.tuners.tuners_utils import BaseTunerLayer

        _check_targets(model, config.targets)
        classifies = hasattr(model, HEAD)
        settings = peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]
            target_modules=list(config.targets) or "all-linear",
            use_dora=config.dora,
            task_type="SEQ_CLS" if classifies else "CAUSAL_LM",
            modules_to_save=[HEAD] if classifies else None,
            fan_in_fan_out=model.config.model_type == "gpt2",
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            try:
                self._peft: Any = peft.get_peft_model(model, settings)
            except ValueError as error:
                raise BadSettings(f"`[lora]` does not fit {type(model).__name__}: {error}") from error
        self.model = model
        self._base_digests: Mapping[str, str] | None = None
        self._layers = {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}

    def disabled(self) -> AbstractContextManager[None]:
        """Disable the adapters inside the ``with`` block."""
        return self._peft.disable_adapter()

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """The weights of an equal model without PEFT: Hugging Face names, with the adapters merged.

        Adapted weights are computed one at a time; the other tensors are live.
        """
        return self._weights(self._merged)

    def base_digests(self, ranks: Ranks) -> Mapping[str, str]:
        """The digest of each tensor that the adapters belong to, without a trained head, by Hugging
        Face name. Computed once, by rank 0; every rank must call it, and the others get none."""
        if self._base_digests is None:
            frozen = self._weights(lambda _layer, _rest, tensor: whole(tensor), trained=False)
            if ranks.rank:
                deque(frozen, maxlen=0)  # rank 0 gathers them
            self._base_digests = {} if ranks.rank else streamed_digest(frozen)[0].tensors
        return self._base_digests

    def _weights(self, adapted: Callable[[str, str, Tensor], Tensor], *, trained: bool = True) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the model without PEFT. adapted: gives a tensor from the name of its
        adapted layer, its name in that layer, and the frozen tensor. trained: include a trained
        head."""
        inside = tuple(f"{name}." for name in self._layers)
        for name, tensor in named_weights(self.model):
            layer, base, rest = name.rpartition(_BASE)
            module, saved, leaf = name.partition(_WHOLE)
            if saved:
                if trained:
                    yield f"{module}.{leaf}", whole(tensor)
            elif _UNTRAINED in name:
                continue
            elif base and not rest.startswith(_ADAPTER):  # several adapters on one module are nested
                yield f"{layer.replace(_BASE.rstrip('.'), '')}.{rest}", adapted(layer, rest, tensor)
            elif not base and not name.startswith(inside):
                yield name, whole(tensor)

    def tensors(self) -> dict[str, Tensor]:
        """The live adapters under PEFT's names."""
        from peft.utils import get_peft_model_state_dict

        return get_peft_model_state_dict(self._peft, adapter_name=NAME)

    def differs(self, directory: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> str:
        """Why saved adapters of the same shapes do not fit this run's settings; empty if they
        do."""
        import peft

        own: Any = self._peft.peft_config[NAME]
        saved: Any = peft.LoraConfig.from_pretrained(str(directory))
        if saved.lora_alpha != own.lora_alpha:
            return f"was trained with `lora.alpha` = {saved.lora_alpha:g}, but the run's config has {own.lora_alpha:g}"
        lost = sorted(tensors.keys() - self.tensors().keys())
        return f"has {lost[0]}, which the run's `lora.targets` and `lora.dora` exclude" if lost else ""

    def save_settings(self, directory: str | os.PathLike[str], model: Path) -> None:
        """Write ``adapter_config.json``. model: the folder of the run's model."""
        name, revision = published_name(model)
        settings = replace(self._peft.peft_config[NAME], base_model_name_or_path=name, revision=revision, inference_mode=True)
        settings.save_pretrained(str(directory))

    @torch.no_grad()
    def read(self, directory: Path) -> None:
        """Load the adapters of a folder. Raises ``WeightsUnreadable``."""
        path = directory / ADAPTER_FILE
        try:
            sent = read_tensors(path)
        except (OSError, ValueError) as error:
            raise WeightsUnreadable(f"{path}: {error}") from error
        live = self.tensors()
        if {name: (t.shape, t.dtype) for name, t in live.items()} != {name: (t.shape, t.dtype) for name, t in sent.items()}:
            raise WeightsUnreadable(f"{path} has other adapters than the `lora` table of the plan describes")
        for name, tensor in live.items():
            tensor.copy_(sent[name])

    def _merged(self, name: str, leaf: str, tensor: Tensor) -> Tensor:
        """Parameter ``leaf`` of a module with PEFT's merge; the module itself is unchanged.
        ``tensor`` if it has no adapter.

        Experts are parameters of three dimensions; each has an adapter around their common module.
        """
        layer: Any = self._layers[name]
        while getattr(layer, "parameter_name", "weight") != leaf:
            name, _, inner = name.rpartition(".")
            if f".{inner}." != _BASE:
                return whole(tensor)
            layer = self._layers[name]
        with gathered(layer), torch.no_grad():
            parameter = getattr(layer.get_base_layer(), leaf)
            kept = parameter.data
            parameter.data = kept.clone()
            try:
                layer.merge(adapter_names=[NAME])
                return parameter.data
            finally:
                parameter.data = kept
                layer.merged_adapters.clear()


def published_name(model: Path) -> tuple[str, str | None]:
    """Where others find a model: its name and commit on the hub, if the folder belongs to the cache
    of ``huggingface_hub``, else its absolute path."""
    folder = model.absolute()
    kind, *name = folder.parent.parent.name.split("--")
    if folder.parent.name == "snapshots" and kind == "models" and name:
        return "/".join(name), folder.name
    return str(folder), None


def _check_targets(model: PreTrainedModel, targets: tuple[str, ...]) -> None:
    """Raise ``BadSettings`` for a target that is not a linear layer, or is the head."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    linear: set[str] = set()
    for name, module in model.named_modules():
        if module in (head, embedding) or name == HEAD or type(module).__name__ not in ("Linear", "Conv1D"):
            continue
        linear.add(name.rpartition(".")[2])
    for target in targets:
        if target not in linear:
            raise BadSettings(
                f"`lora.targets` names {target!r}, but the model has no such linear layer besides its head; "
                f"it has {', '.join(sorted(linear))}"
            )
