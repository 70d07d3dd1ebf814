"""Low-rank adapters (PEFT) on frozen weights."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from rollout_workers.trainer.distributed.shards import gathered, whole
from rollout_workers.trainer.types import BadSettings
from rollout_workers.weights import named_weights

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
        self._layers = {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}

    def disabled(self) -> AbstractContextManager[None]:
        """Disable the adapters inside the ``with`` block."""
        return self._peft.disable_adapter()

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """The weights of an equal model without PEFT: Hugging Face names, with the adapters merged.

        Adapted weights are computed one at a time; the other tensors are live.
        """
        inside = tuple(f"{name}." for name in self._layers)
        for name, tensor in named_weights(self.model):
            layer, base, rest = name.rpartition(_BASE)
            module, saved, leaf = name.partition(_WHOLE)
            if saved:
                yield f"{module}.{leaf}", whole(tensor)
            elif _UNTRAINED in name:
                continue
            elif base and not rest.startswith(_ADAPTER):  # several adapters on one module are nested
                yield f"{layer.replace(_BASE.rstrip('.'), '')}.{rest}", self._merged(layer, rest, tensor)
            elif not base and not name.startswith(inside):
                yield name, whole(tensor)

    def tensors(self) -> dict[str, Tensor]:
        """The live adapters under PEFT's names."""
        return get_peft_model_state_dict(self._peft, adapter_name=NAME)

    def differs(self, directory: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> str:
        """Why saved adapters of the same shapes do not fit this run's settings; empty if they
        do."""
        own: Any = self._peft.peft_config[NAME]
        saved: Any = peft.LoraConfig.from_pretrained(str(directory))
        if saved.lora_alpha != own.lora_alpha:
            return f"was trained with `lora.alpha` = {saved.lora_alpha:g}, but the run's config has {own.lora_alpha:g}"
        lost = sorted(tensors.keys() - self.tensors().keys())
        return f"has {lost[0]}, which the run's `lora.targets` and `lora.dora` exclude" if lost else ""

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write a folder that ``PeftModel.from_pretrained`` loads onto the run's initial model."""
        self.write(directory, self.tensors())

    def write(self, directory: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> None:
        """``save`` with tensors that were gathered before."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        self.save_settings(directory)
        copied = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(copied, Path(directory) / "adapter_model.safetensors", metadata={"format": "pt"})

    def save_settings(self, directory: str | os.PathLike[str], base: str | None = None) -> None:
        """Write ``adapter_config.json``. base: the folder of the base model."""
        settings = replace(self._peft.peft_config[NAME], base_model_name_or_path=base, inference_mode=True)
        settings.save_pretrained(str(directory))

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
