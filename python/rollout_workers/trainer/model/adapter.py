"""Low-rank adapters (PEFT): what is trained beside weights that stay as they are."""

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
"""What a sequence classifier scores with. It is new, so it is trained whole, and a part of the adapter."""
_WHOLE = f".modules_to_save.{NAME}."
_UNTRAINED = ".original_module."


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Settings of the adapters (LoRA, arXiv 2106.09685; DoRA, arXiv 2402.09353), by the names of the run config.

    The weight of an adapted layer is ``W + (alpha / rank) B A``; with ``dora`` its rows are then scaled to a trained
    magnitude. ``targets`` are names of linear layers, such as ``q_proj``; empty: all but the head.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ()
    dora: bool = False


class Adapter:
    """The adapters of one model, which is changed in place. They begin as nothing: the model answers as before.

    Of a sequence classifier the head is trained beside them, whole.
    """

    def __init__(self, model: PreTrainedModel, config: LoraConfig, *, seed: int = 0) -> None:
        """Freeze the model and put an adapter on each target. Raises ``BadSettings`` where a target names no linear layer, or
        PEFT can't adapt the model so.

        The same model, settings and seed give the same adapters, whatever was drawn before.
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

    def off(self) -> AbstractContextManager[None]:
        """While it is entered the model answers without adapters, as it did before training."""
        return self._peft.disable_adapter()

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """The weights under their Hugging Face names with the adapters merged in, as a model without PEFT holds them.

        Adapted weights are computed anew, one at a time; the others are the live ones.
        """
        inside = tuple(f"{name}." for name in self._layers)
        for name, tensor in named_weights(self.model):
            layer, base, rest = name.rpartition(_BASE)
            module, saved, leaf = name.partition(_WHOLE)
            if saved:
                yield f"{module}.{leaf}", whole(tensor)
            elif _UNTRAINED in name:
                continue
            elif base and not rest.startswith(_ADAPTER):  # of several adapters on one module each holds the next
                yield f"{layer.replace(_BASE.rstrip('.'), '')}.{rest}", self._merged(layer, rest, tensor)
            elif not base and not name.startswith(inside):
                yield name, whole(tensor)

    def tensors(self) -> dict[str, Tensor]:
        """The live adapters under PEFT's names."""
        return get_peft_model_state_dict(self._peft, adapter_name=NAME)

    def differs(self, directory: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> str:
        """How saved adapters, which fit by their shapes, would be other ones here; empty: they would not."""
        own: Any = self._peft.peft_config[NAME]
        saved: Any = peft.LoraConfig.from_pretrained(str(directory))
        if saved.lora_alpha != own.lora_alpha:
            return f"was trained with `lora.alpha` = {saved.lora_alpha:g}, the run's config says {own.lora_alpha:g}"
        lost = sorted(tensors.keys() - self.tensors().keys())
        return f"has {lost[0]}, for which the run's `lora.targets` and `lora.dora` have no place" if lost else ""

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write a folder that ``PeftModel.from_pretrained`` loads onto the model that the run began with."""
        self.write(directory, self.tensors())

    def write(self, directory: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> None:
        """``save`` with tensors that were taken before, whole."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        self.save_settings(directory)
        copied = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(copied, Path(directory) / "adapter_model.safetensors", metadata={"format": "pt"})

    def save_settings(self, directory: str | os.PathLike[str], base: str | None = None) -> None:
        """Write ``adapter_config.json``. base: folder of the model that they belong to."""
        settings = replace(self._peft.peft_config[NAME], base_model_name_or_path=base, inference_mode=True)
        settings.save_pretrained(str(directory))

    def _merged(self, name: str, leaf: str, tensor: Tensor) -> Tensor:
        """Merge a parameter of one module, ``leaf``, as PEFT does, and put it back bit for bit; one without an adapter is itself.

        Experts are parameters with three dimensions, each of which has an adapter around the module that holds all.
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
    """Only linear layers have adapters, and never the head: embeddings and head stay as the tokenizer needs them."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    linear: set[str] = set()
    for name, module in model.named_modules():
        if module in (head, embedding) or name == HEAD or type(module).__name__ not in ("Linear", "Conv1D"):
            continue
        linear.add(name.rpartition(".")[2])
    for target in targets:
        if target not in linear:
            raise BadSettings(
                f"`lora.targets` names {target!r}, but the model has no such linear layer below its head; "
                f"it has {', '.join(sorted(linear))}"
            )
