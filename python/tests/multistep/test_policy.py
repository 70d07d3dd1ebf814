from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout_workers.multistep import MultiStepRolloutWorker, SettingsInvalid
from rollout_workers.multistep.actor_critic import ActorCritic
from rollout_workers.multistep.policy import load_policy
from rollout_workers.weights.pretrained import WeightsIncomplete

from .worlds import actor_critic, config

STATES = torch.randn(5, 4, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    actor_critic(seed=4).save_pretrained(tmp_path)
    return tmp_path


def test_a_saved_policy_is_loaded_by_the_worker(folder: Path) -> None:
    worker = MultiStepRolloutWorker(config(rollout__model={"model_path": str(folder)}))
    worker.init_worker()
    assert isinstance(worker.hf_model, ActorCritic)
    assert not worker.hf_model.training
    wanted, found = (
        policy.predict_action_batch({"states": STATES}, "eval") for policy in (actor_critic(seed=4), worker.hf_model)
    )
    assert torch.equal(wanted[0], found[0])
    assert torch.equal(wanted[1]["prev_values"], found[1]["prev_values"])


def test_transformers_alone_loads_it_with_its_code(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """In a process that can't import this package."""
    states = tmp_path_factory.mktemp("states") / "states.safetensors"
    save_file({"states": STATES}, states)
    program = """
import sys
sys.modules["rollout_workers"] = None
from safetensors.torch import load_file
from transformers import AutoModel
policy = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
actions, prediction = policy.predict_action_batch(load_file(sys.argv[2]), "eval")
print(type(policy).__name__, actions.tolist())
"""
    cache = str(tmp_path_factory.mktemp("modules"))
    ran = subprocess.run(
        [sys.executable, "-c", program, folder, states],
        env={"PATH": "", "HF_HOME": cache, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    actions = actor_critic(seed=4).predict_action_batch({"states": STATES}, "eval")[0]
    assert ran.stdout.strip() == f"ActorCritic {actions.tolist()}", ran.stderr


def test_a_folder_without_a_tensor_is_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["value_head.0.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(WeightsIncomplete, match=r"has no tensor value_head\.0\.weight"):
        load_policy(str(folder), device="cpu", trust_remote_code=False)


def test_a_model_without_actions_is_refused(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    BertModel(
        BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=5)
    ).save_pretrained(tmp_path)
    with pytest.raises(SettingsInvalid, match=r"BertModel of .* has no method predict_action_batch; add `predict_action_batch"):
        load_policy(str(tmp_path), device="cpu", trust_remote_code=False)


@pytest.mark.parametrize("settings", [{}, {"continuous": True, "action_size": 3}, {"chunk": 1, "value_columns": 1}])
def test_the_logprobs_of_sampled_actions_are_computed_again(settings: dict[str, Any]) -> None:
    policy = actor_critic(**settings)
    torch.manual_seed(7)
    actions, prediction = policy.predict_action_batch({"states": STATES}, "train")
    chunk = policy.config.chunk
    assert actions.shape == ((5, chunk, 3) if policy.config.continuous else (5, chunk))
    logprobs, entropies, values = policy(**prediction["forward_inputs"])
    assert torch.equal(logprobs, prediction["prev_logprobs"])
    assert torch.equal(values, prediction["prev_values"])
    assert logprobs.shape == entropies.shape == (5, chunk)
    assert values.shape == (5, policy.config.value_columns)
    again = policy.predict_action_batch({"states": STATES}, "train")[0]
    assert not torch.equal(actions, again)
    modes = [policy.predict_action_batch({"states": STATES}, "eval")[0] for _ in range(2)]
    assert torch.equal(*modes)


def test_the_config_names_the_code_next_to_the_weights(folder: Path) -> None:
    assert json.loads((folder / "config.json").read_text())["auto_map"]["AutoModel"] == "actor_critic.ActorCritic"
    assert (folder / "actor_critic.py").exists()
