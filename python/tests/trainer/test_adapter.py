"""Training changes only the adapters. Merged adapters and adapters loaded by PEFT give the same
model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from google.protobuf.json_format import ParseDict
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rollout.config.v1.run_config_pb2 import RunConfig
from rollout_workers.algorithms import GrpoConfig
from rollout_workers.learner.merge import merge_folders
from rollout_workers.trainer import BadSettings, LoraConfig, Schedule, StateUnreadable, Trainer, TrainerConfig
from rollout_workers.trainer.model.adapter import published_name
from rollout_workers.weights import named_weights, read_weights, weights_digest

from .addition import prepare_model, sampled_batch
from .oracle import sample_logprobs
from .test_families import pairs

LORA = LoraConfig(rank=4, alpha=8.0)
CONFIG = TrainerConfig(settings=GrpoConfig(kl_coefficient=0.05), schedule=Schedule(peak=1e-2), threads=1, lora=LORA)
KINDS = {
    "lora": CONFIG,
    "dora": dataclasses.replace(CONFIG, lora=dataclasses.replace(LORA, dora=True)),
    "some layers": dataclasses.replace(CONFIG, lora=dataclasses.replace(LORA, targets=("q_proj", "down_proj"))),
    "bfloat16": dataclasses.replace(CONFIG, dtype=torch.bfloat16),
}


def trained(model_dir: Path, config: TrainerConfig, steps: int = 3) -> Trainer:
    """A trainer after some steps."""
    learner = Trainer(model_dir, config)
    for step in range(1, steps + 1):
        learner.train_step(sampled_batch(step), step)
    return learner


@pytest.mark.parametrize("kind", KINDS)
def test_only_adapters_change_and_merged_weights_equal_the_policy(kind: str, model_dir: Path, tmp_path: Path) -> None:
    config = KINDS[kind]
    learner = Trainer(model_dir, config)
    original = {name: tensor.clone() for name, tensor in AutoModelForCausalLM.from_pretrained(model_dir).state_dict().items()}
    begin = learner.weights_digest().root
    assert begin == Trainer(model_dir, dataclasses.replace(config, lora=None)).weights_digest().root
    trainable = sum(p.numel() for p in learner.optimizer.parameters)
    assert trainable < 0.6 * sum(t.numel() for t in original.values())
    for step in (1, 2, 3):
        learner.train_step(sampled_batch(step), step)
    assert learner.weights_digest().root != begin

    learner.write_weights(tmp_path / "merged")
    merged = read_weights(tmp_path / "merged")
    adapted = ("q_proj", "down_proj") if kind == "some layers" else ("proj",)
    for name, tensor in merged.items():
        moved = not torch.equal(tensor.float(), original[name].to(config.dtype).float())
        assert moved == any(part in name for part in adapted), name

    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=config.dtype)
    tolerance = 0.1 if config.dtype is torch.bfloat16 else 1e-5
    for sample in sampled_batch(9)[:4]:
        torch.testing.assert_close(
            sample_logprobs(plain, sample), sample_logprobs(learner.policy.model, sample), atol=tolerance, rtol=tolerance
        )


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_peft_loads_the_adapter_of_a_state(kind: str, model_dir: Path, tmp_path: Path) -> None:
    learner = trained(model_dir, KINDS[kind])
    learner.save_state(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    for sample in sampled_batch(9)[:4]:
        torch.testing.assert_close(
            sample_logprobs(loaded, sample), sample_logprobs(learner.policy.model, sample), atol=1e-6, rtol=1e-6
        )


@pytest.mark.parametrize("kind", ["lora", "dora", "bfloat16"])
def test_the_adapter_of_a_state_finds_its_model(kind: str, model_dir: Path, tmp_path: Path) -> None:
    learner = trained(model_dir, KINDS[kind])
    learner.save_state(tmp_path / "state")
    learner.write_weights(tmp_path / "merged")
    dtype = KINDS[kind].dtype
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "state" / "adapter", dtype=dtype)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=dtype)
    ids, tolerance = torch.arange(3, 15)[None] % 11, 0.1 if dtype is torch.bfloat16 else 1e-5
    with torch.no_grad():
        torch.testing.assert_close(adapted(input_ids=ids).logits, merged(input_ids=ids).logits, atol=tolerance, rtol=tolerance)


def test_a_model_of_the_hub_is_named_as_there(tmp_path: Path) -> None:
    commit = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
    cached = tmp_path / "hub" / "models--HuggingFaceTB--SmolLM2-135M" / "snapshots" / commit
    assert published_name(cached) == ("HuggingFaceTB/SmolLM2-135M", commit)
    assert published_name(tmp_path / "models" / "tiny") == (str(tmp_path / "models" / "tiny"), None)


def test_a_state_contains_the_adapters_without_the_model(model_dir: Path, tmp_path: Path) -> None:
    trained(model_dir, CONFIG, 1).save_state(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"adapter", "optimizer.safetensors", "state.json"}
    adapters = sum(path.stat().st_size for path in (tmp_path / "adapter").iterdir())
    assert adapters < 0.7 * (model_dir / "model.safetensors").stat().st_size


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_merged_to_the_weights_of_the_run(kind: str, model_dir: Path, tmp_path: Path) -> None:
    learner = trained(model_dir, KINDS[kind])
    learner.save_state(tmp_path / "state")
    written = merge_folders(run_config(KINDS[kind]), model_dir, tmp_path / "state" / "adapter", tmp_path / "merged", 3)
    assert written.digest == learner.weights_digest().root
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=KINDS[kind].dtype)
    assert weights_digest(named_weights(plain)).root == written.digest


def run_config(config: TrainerConfig, algorithm: str = "grpo") -> RunConfig:
    """The run config of a trainer's config."""
    assert config.lora is not None
    lora = {"rank": config.lora.rank, "alpha": config.lora.alpha, "targets": config.lora.targets, "dora": config.lora.dora}
    model = {"dtype": str(config.dtype).removeprefix("torch.")}
    return ParseDict({"algorithm": {algorithm: {}}, "lora": lora, "model": model}, RunConfig())


def test_the_reference_is_the_model_without_adapters(model_dir: Path) -> None:
    full = Trainer(model_dir, dataclasses.replace(CONFIG, lora=None))
    learner = trained(model_dir, CONFIG)
    assert learner.models.reference is not None and full.models.reference is not None
    assert learner.models.reference._policy is learner.policy
    from rollout_workers.trainer.packing import pack

    (batch,) = pack(sampled_batch(5), range(24), tokens=1 << 16)
    before = learner.policy.logprobs(batch).tokens.detach()
    torch.testing.assert_close(
        learner.models.reference.logprobs(batch), full.models.reference.logprobs(batch), atol=1e-6, rtol=1e-6
    )
    torch.testing.assert_close(learner.policy.logprobs(batch).tokens.detach(), before, atol=0, rtol=0)
    assert learner.train_step(sampled_batch(4), 4).metrics["kl/reference"] > 1e-6


def test_a_restored_state_resumes_bit_for_bit(model_dir: Path, tmp_path: Path) -> None:
    learner = trained(model_dir, CONFIG)
    learner.save_state(tmp_path)
    restored = Trainer(model_dir, dataclasses.replace(CONFIG, seed=7))  # starts with other adapters
    restored.load_state(tmp_path)
    assert restored.weights_digest().root == learner.weights_digest().root
    for step in (4, 5):
        learner.train_step(sampled_batch(step), step)
        restored.train_step(sampled_batch(step), step)
    assert restored.weights_digest().root == learner.weights_digest().root


def test_a_state_of_the_other_kind_is_refused(model_dir: Path, tmp_path: Path) -> None:
    trained(model_dir, CONFIG, 1).save_state(tmp_path / "with")
    full = trained(model_dir, dataclasses.replace(CONFIG, lora=None), 1)
    full.save_state(tmp_path / "without")
    with pytest.raises(StateUnreadable, match="with adapters"):
        full.load_state(tmp_path / "with")
    with pytest.raises(StateUnreadable, match="without adapters"):
        Trainer(model_dir, CONFIG).load_state(tmp_path / "without")


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (LoraConfig(rank=4, alpha=64), r"`lora.alpha` = 8, but the run's config has 64"),
        (LoraConfig(rank=4, alpha=8, targets=("q_proj",)), r"has .*down_proj.*`lora.targets`"),
    ],
)
def test_adapters_with_other_settings_are_refused(lora: LoraConfig, message: str, model_dir: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, lora=LoraConfig(rank=4, alpha=8))
    trained(model_dir, config, 1).save_state(tmp_path)
    with pytest.raises(StateUnreadable, match=message):
        Trainer(model_dir, dataclasses.replace(config, lora=lora)).load_state(tmp_path)


def test_adapters_of_another_model_are_refused(model_dir: Path, tmp_path: Path) -> None:
    trained(model_dir, CONFIG, 1).save_state(tmp_path / "state")
    other = Trainer(prepare_model(tmp_path / "other", seed=5), CONFIG)
    with pytest.raises(StateUnreadable, match=r"for another model than .*other: .* differs"):
        other.load_state(tmp_path / "state")


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "q_prj"])
def test_a_target_that_is_not_a_linear_layer_is_refused(model_dir: Path, target: str) -> None:
    with pytest.raises(BadSettings, match=rf"{target}.*it has .*q_proj"):
        Trainer(model_dir, dataclasses.replace(CONFIG, lora=LoraConfig(targets=(target,))))


def test_the_head_of_a_reward_model_is_trained_in_full_with_adapters(model_dir: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, algorithm="reward_model", settings=None)
    learner, samples = Trainer(model_dir, config), pairs(2)
    begin = {name: tensor.clone() for name, tensor in learner.named_weights()}
    for step in range(1, 16):
        metrics = learner.train_step(samples, step).metrics
    assert metrics["rewards/accuracy"] >= 0.9

    learner.save_state(tmp_path)
    written = merge_folders(run_config(CONFIG, "reward_model"), model_dir, tmp_path / "adapter", tmp_path / "weights", 15)
    assert written.digest == learner.weights_digest().root
    merged = read_weights(tmp_path / "weights")
    assert set(merged) == set(begin)
    moved = {name for name, tensor in merged.items() if not torch.equal(tensor, begin[name])}
    assert "score.weight" in moved and all("proj" in name or name == "score.weight" for name in moved)

    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "weights")
    base = AutoModelForSequenceClassification.from_pretrained(model_dir, num_labels=1, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    with torch.no_grad():
        for sample in samples[:4]:
            ids = torch.from_numpy(sample.token_ids).long()[None]
            wanted = learner.policy.model(input_ids=ids).logits
            for found in (plain(input_ids=ids).logits, adapted(input_ids=ids).logits):
                torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def experts(folder: Path) -> Path:
    """The folder of a mixture of experts, whose experts are parameters of one module instead of
    linear layers."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, initializer_range=0.2, pad_token_id=None,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def test_experts_are_merged_under_their_own_names(tmp_path: Path) -> None:
    learner = Trainer(experts(tmp_path / "model"), CONFIG)
    begin = {name: tensor.clone() for name, tensor in learner.named_weights()}
    assert set(begin) == set(AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict())
    for step in (1, 2, 3):
        learner.train_step(sampled_batch(step), step)
    learner.save_state(tmp_path / "state")
    moved = {name for name, tensor in learner.named_weights() if not torch.equal(tensor, begin[name])}
    assert {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"} <= moved
    assert all("proj" in name or name.endswith("mlp.gate.weight") for name in moved)

    written = merge_folders(run_config(CONFIG), tmp_path / "model", tmp_path / "state" / "adapter", tmp_path / "merged", 3)
    assert written.digest == learner.weights_digest().root
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    loaded: Any = peft.PeftModel.from_pretrained(base, str(tmp_path / "state" / "adapter"))
    for sample in sampled_batch(9)[:4]:
        wanted = sample_logprobs(learner.policy.model, sample)
        for found in (merged, loaded):
            torch.testing.assert_close(sample_logprobs(found, sample), wanted, atol=1e-4, rtol=1e-4)


def test_adapters_that_experts_do_not_support_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match=r"`\[lora\]` does not fit Qwen3MoeForCausalLM: .*use_dora"):
        Trainer(experts(tmp_path), dataclasses.replace(CONFIG, lora=LoraConfig(rank=4, dora=True)))
