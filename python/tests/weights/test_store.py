"""Weights folders are complete or absent, read back unchanged, and loadable by transformers."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rollout_workers.weights import (
    named_weights,
    read_manifest,
    read_weights,
    seal,
    store,
    streamed_digest,
    weights_digest,
    write_adapter,
    write_weights,
)
from rollout_workers.weights.store import WeightsUnreadable


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    """A decoder with tied embeddings, and its folder with a tokenizer's file in it."""
    folder = tmp_path_factory.mktemp("model")
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "optimizer.pt").write_text("not for everybody")
    return model, folder


@pytest.mark.parametrize("least", [0, 1 << 30], ids=["hashed while written", "hashed after"])
def test_tensors_are_read_back_unchanged(
    model: tuple[PreTrainedModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    monkeypatch.setattr(store, "_TOGETHER_BYTES", least)
    module, source = model
    manifest = write_weights(tmp_path / "v000003", module, config_source_dir=source, version=3)
    tensors = read_weights(tmp_path / "v000003")
    assert weights_digest(tensors.items()).root == manifest.digest == weights_digest(named_weights(module)).root
    assert read_manifest(tmp_path / "v000003") == manifest
    assert manifest.version == 3
    assert {entry.name: entry.shape for entry in manifest.tensors} == {n: tuple(t.shape) for n, t in tensors.items()}


def test_transformers_loads_the_folder(model: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    module, source = model
    write_weights(tmp_path / "v", module, config_source_dir=source, version=1)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "v")
    token_ids = torch.arange(10)[None]
    assert torch.equal(loaded(token_ids).logits, module.eval()(token_ids).logits)


def test_tied_tensors_are_written_once_and_files_are_listed(model: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    module, source = model
    manifest = write_weights(tmp_path / "v", module, config_source_dir=source, version=1)
    names = [entry.name for entry in manifest.tensors]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    files = {entry.path: entry.bytes for entry in manifest.files}
    assert set(files) == {"config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json"}
    assert all((tmp_path / "v" / path).stat().st_size == size for path, size in files.items())


def test_a_version_that_is_written_again_replaces_the_old_one(model: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    _, source = model
    write_weights(tmp_path / "v", [("w", torch.zeros(3))], config_source_dir=source, version=1)
    mapped = read_weights(tmp_path / "v")["w"]
    write_weights(tmp_path / "v", [("w", torch.ones(3))], config_source_dir=source, version=1, fsync=False)
    assert read_weights(tmp_path / "v")["w"].tolist() == [1, 1, 1]
    assert mapped.tolist() == [0, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["v"]


def test_a_failed_write_leaves_nothing(
    model: tuple[PreTrainedModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_weights(tmp_path / "v", [("w", torch.zeros(3))], config_source_dir=model[1], version=1)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_during_hashing_raises_an_error(
    model: tuple[PreTrainedModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(store, "_TOGETHER_BYTES", 0)
    monkeypatch.setattr(store, "write_tensors", full)
    with pytest.raises(OSError, match="no space"):
        write_weights(tmp_path / "v", [("w", torch.zeros(3))], config_source_dir=model[1], version=1)
    assert list(tmp_path.iterdir()) == []


def test_transport_dtype(model: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    tensors = [("w", torch.tensor([1.0, 2.5])), ("ids", torch.tensor([1, 2]))]
    manifest = write_weights(tmp_path / "v", tensors, config_source_dir=model[1], version=1, dtype=torch.bfloat16)
    assert {entry.name: entry.dtype for entry in manifest.tensors} == {"w": "bfloat16", "ids": "int64"}
    assert read_weights(tmp_path / "v")["w"].dtype == torch.bfloat16


def test_shards_are_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "1.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "2.safetensors")
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert {name: t.tolist() for name, t in read_weights(tmp_path).items()} == {"a": [1, 1], "b": [0, 0]}


def test_a_source_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        write_weights(tmp_path / "v", [], config_source_dir=tmp_path, version=1)


def test_damage_is_named(model: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    folder = tmp_path / "v"
    write_weights(folder, [("w", torch.zeros(3))], config_source_dir=model[1], version=1)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:40])
    (folder / "rollout_weights.json").write_text("{}")
    with pytest.raises(WeightsUnreadable, match=r"model\.safetensors"):
        read_weights(folder)
    with pytest.raises(WeightsUnreadable, match=r"rollout_weights\.json: KeyError\('version'\)"):
        read_manifest(folder)


def test_the_tokenizer_is_copied(addition_model: Path, tmp_path: Path) -> None:
    manifest = write_weights(tmp_path / "v", read_weights(addition_model).items(), config_source_dir=addition_model, version=1)
    assert AutoTokenizer.from_pretrained(tmp_path / "v").decode([4, 10, 13]) == "17+"
    assert {"tokenizer.json", "chat_template.jinja"} <= {entry.path for entry in manifest.files}


def test_the_manifest_is_json_whatever_tensors_are_called(model: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    _, source = model
    names = ['a "quoted" one', "back\\slash", "größer", "plain.weight"]
    tensors = [(name, torch.full((2, 3), float(at))) for at, name in enumerate(names)]
    for version in (1, 2):  # the second time from cached JSON
        manifest = write_weights(tmp_path / "v", tensors, config_source_dir=source, version=version)
        raw = json.loads((tmp_path / "v" / "rollout_weights.json").read_text())
        assert sorted(raw) == ["digest", "files", "tensors", "version"]
        assert [entry["name"] for entry in raw["tensors"]] == sorted(names)
        assert read_manifest(tmp_path / "v") == manifest


def empty_settings(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


def test_a_version_shares_no_file_with_the_model(addition_model: Path, tmp_path: Path) -> None:
    """An edit of one must not change the other."""
    source, folder = shutil.copytree(addition_model, tmp_path / "model"), tmp_path / "v"
    write_weights(folder, read_weights(source).items(), config_source_dir=source, version=1)
    adapter = tmp_path / "adapter"
    write_adapter(
        adapter,
        {"w": torch.zeros(2)},
        streamed_digest([("w", torch.zeros(2))]),
        settings=empty_settings,
        config_source_dir=source,
        version=1,
    )
    shared = {path.stat().st_ino for path in source.iterdir()}
    for made in (folder, adapter):
        assert len(list(made.iterdir())) > 4
        assert not [path.name for path in made.iterdir() if path.stat().st_ino in shared]


@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "adapter"])
def test_a_sealed_manifest_has_the_digest_of_every_file(addition_model: Path, tmp_path: Path, adapter: bool) -> None:
    folder = tmp_path / "v"
    if adapter:
        write_adapter(
            folder,
            {"w": torch.zeros(2)},
            streamed_digest([("w", torch.zeros(2))]),
            settings=empty_settings,
            config_source_dir=addition_model,
            version=1,
        )
    else:
        write_weights(folder, [("w", torch.zeros(2))], config_source_dir=addition_model, version=1)
    seal(folder)
    found = {path.name: f"blake3-{blake3(path.read_bytes()).hexdigest()}" for path in folder.iterdir()}
    del found["rollout_weights.json"]
    assert {file.path: file.digest for file in read_manifest(folder).files} == found
    assert ("adapter_model.safetensors" in found, "config.json" in found) == (adapter, not adapter)


def test_an_edited_model_gives_new_digests(model: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    """The contents of small files are cached, as long as the files are unchanged."""
    source = shutil.copytree(model[1], tmp_path / "model")
    for text in ("{}", "[]"):
        (source / "tokenizer_config.json").write_text(text)
        manifest = write_weights(tmp_path / "v", [("w", torch.zeros(2))], config_source_dir=source, version=1)
        (entry,) = (file for file in manifest.files if file.path == "tokenizer_config.json")
        assert entry.digest == f"blake3-{blake3(text.encode()).hexdigest()}"
        assert (tmp_path / "v" / "tokenizer_config.json").read_text() == text
