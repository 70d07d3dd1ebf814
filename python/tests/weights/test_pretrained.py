"""A folder that lacks weights of the model is refused instead of being filled with random
numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rollout_workers.weights.pretrained import ModelUnknown, WeightsIncomplete, load_whole


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    config = Qwen3Config(
        vocab_size=12,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        tie_word_embeddings=request.param,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def test_a_whole_model_loads(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    loaded = load_whole(AutoModelForCausalLM, folder).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stored.items())


def test_a_missing_tensor_is_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"):
        del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsIncomplete, match=re.escape("has no tensor model.layers.0.mlp.up_proj.weight, and 1 others")):
        load_whole(AutoModelForCausalLM, folder)


def test_resized_embeddings_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 16}))
    with pytest.raises(WeightsIncomplete, match=re.escape("has the shape 12x8, and config.json wants 16x8")):
        load_whole(AutoModelForCausalLM, folder)


def test_an_unknown_model_is_refused_permanently(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "qwen99"}))
    with pytest.raises(ModelUnknown, match=r"can't be loaded by AutoModelForCausalLM: .*qwen99") as refused:
        load_whole(AutoModelForCausalLM, folder)
    assert refused.value.permanent and "\n" not in str(refused.value)
