"""Policies whose actions are tokens of a language model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from rollout_workers.multistep.policy import load_policy
from rollout_workers.multistep.token_actor import TokenActor, TokenActorConfig
from rollout_workers.multistep.trainer import chunks_of, loss_of

from .test_episodes import PPO, play, playing, samples_of, trainer

STATES = torch.randn(5, 4, generator=torch.Generator().manual_seed(3))
CONTINUOUS = {"continuous": True, "action_size": 3, "action_bins": 16, "action_limits": [1.0, 2.0, 4.0]}


def token_actor(seed: int = 0, *, tie: bool = False, **settings: Any) -> TokenActor:
    torch.manual_seed(seed)
    model = LlamaConfig(
        vocab_size=96,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tie,
        initializer_range=0.5,
    )
    defaults = {"chunk": 2, "value_columns": 2, "observation_limits": [7.0, 6.0, 3.0, 1.0], "prompt_ids": [5, 6]}
    policy = TokenActor(TokenActorConfig(language_model=model.to_dict(), **{**defaults, **settings})).eval()
    torch.nn.init.normal_(policy.value_head.weight)
    return policy


@pytest.mark.parametrize("settings", [{}, CONTINUOUS, {"chunk": 1, "value_columns": 1}, {"chunk": 3, "value_columns": 1}])
@torch.no_grad()
def test_the_logprobs_of_sampled_tokens_are_computed_again(settings: dict[str, Any]) -> None:
    policy = token_actor(**settings)
    torch.manual_seed(7)
    actions, prediction = policy.predict_action_batch({"states": STATES}, "train")
    chunk, tokens = policy.config.chunk, policy.config.tokens_of_action
    assert actions.shape == ((5, chunk, 3) if policy.config.continuous else (5, chunk))
    logprobs, entropies, values = policy(**prediction["forward_inputs"])
    assert torch.equal(logprobs, prediction["prev_logprobs"]) and torch.equal(values, prediction["prev_values"])
    assert logprobs.shape == entropies.shape == (5, chunk, tokens) and values.shape == (5, policy.config.value_columns)
    drawn = [policy.predict_action_batch({"states": STATES}, "train")[0] for _ in range(8)]
    assert not all(torch.equal(actions, again) for again in drawn)


@torch.no_grad()
def test_logprobs_and_values_are_those_of_the_language_model_after_the_tokens_before() -> None:
    policy = token_actor()
    _, prediction = policy.predict_action_batch({"states": STATES}, "train")
    inputs = prediction["forward_inputs"]
    row = inputs["tokens"]
    assert row.shape == (5, 6) and bool((row[:, :2] == torch.tensor([5, 6])).all())
    for place in range(2):
        out = policy.language_model(input_ids=row, output_hidden_states=True)
        scores = out.logits[:, -1, 94:].log_softmax(-1)
        chosen = inputs["actions"][:, place, 0]
        found = prediction["prev_logprobs"][:, place, 0]
        torch.testing.assert_close(found, scores[torch.arange(5), chosen])
        values = policy.value_head(out.hidden_states[-1][:, -1])[:, place]
        torch.testing.assert_close(prediction["prev_values"][:, place], values)
        row = torch.cat([row, 94 + chosen[:, None]], 1)


@torch.no_grad()
def test_numbers_are_tokens_of_bins() -> None:
    policy = token_actor(**CONTINUOUS)  # 64 tokens of observations from 16 on, 16 of actions from 80 on
    states = torch.tensor([[-7.0, 0.0, 2.99, 9.0], [-70.0, 0.19, -3.0, -1.0]])
    assert policy.tokens_of(states).tolist() == [[5, 6, 16, 48, 79, 79], [5, 6, 16, 49, 16, 16]]
    actions, prediction = policy.predict_action_batch({"states": states}, "train")
    bins = prediction["forward_inputs"]["actions"]
    assert torch.allclose(actions, ((bins + 0.5) / 8 - 1) * torch.tensor([1.0, 2.0, 4.0]))
    assert int(bins.min()) >= 0 and int(bins.max()) < 16


@torch.no_grad()
def test_the_mode_eval_takes_the_most_likely_tokens() -> None:
    policy = token_actor(**CONTINUOUS)
    _, prediction = policy.predict_action_batch({"states": STATES}, "eval")
    first = policy.language_model(input_ids=prediction["forward_inputs"]["tokens"]).logits[:, -1, 80:].argmax(-1)
    assert torch.equal(prediction["forward_inputs"]["actions"][:, 0, 0], first)
    assert torch.equal(first, policy.predict_action_batch({"states": STATES}, "eval")[1]["forward_inputs"]["actions"][:, 0, 0])


@torch.no_grad()
def test_seeds_give_the_distribution_of_the_policy() -> None:
    policy = token_actor(chunk=1, value_columns=1)
    states = STATES[:1].expand(4000, -1)
    actions, prediction = policy.predict_action_batch({"states": states}, "train", torch.arange(4000))
    right = prediction["prev_logprobs"][actions[:, 0] == 1]
    assert float((actions == 1).float().mean()) == pytest.approx(float(right[0].exp()), abs=0.03)
    again = policy.predict_action_batch({"states": states[:9]}, "train", torch.arange(9))[0]
    assert torch.equal(again, actions[:9])


@pytest.mark.parametrize("tie", [False, True])
@torch.no_grad()
def test_a_saved_policy_is_loaded_with_and_without_this_package(tmp_path: Path, tie: bool) -> None:
    policy = token_actor(tie=tie)
    policy.save_pretrained(tmp_path / "policy")
    wanted = policy.predict_action_batch({"states": STATES}, "eval")
    loaded: Any = load_policy(str(tmp_path / "policy"), device="cpu", trust_remote_code=False)
    assert torch.equal(loaded.predict_action_batch({"states": STATES}, "eval")[1]["prev_logprobs"], wanted[1]["prev_logprobs"])
    torch.save(STATES, tmp_path / "states.pt")
    program = """
import sys
sys.modules["rollout_workers"] = None
import torch
from transformers import AutoModel
policy = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
print(policy.predict_action_batch({"states": torch.load(sys.argv[2])}, "eval")[0].tolist())
"""
    ran = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "policy", tmp_path / "states.pt"],
        env={"PATH": "", "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.stdout.strip() == str(wanted[0].tolist()), ran.stderr


def test_a_vocabulary_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="has 96 tokens, and 320 stand for observations and actions: take fewer bins"):
        token_actor(continuous=True)


async def test_episodes_do_not_depend_on_the_other_episodes() -> None:
    found = []
    for seeds in ((3, 4, 5, 6), (3,)):
        async with playing(4, policy=token_actor()) as (player, *_):
            found.append((await play(player, seeds))[0])
    assert all(torch.equal(found[0].tensors[name], found[1].tensors[name]) for name in found[0].tensors)


@pytest.mark.parametrize(
    ("reward_type", "logprob_type"), [("chunk_level", ""), ("chunk_level", "token_level"), ("action_level", "token_level")]
)
async def test_training_begins_with_the_logprobs_of_sampling_and_learns(
    tmp_path: Path, reward_type: str, logprob_type: str
) -> None:
    """In the first update no ratio differs from 1 by more than rounding."""
    policy = token_actor()
    policy.save_pretrained(tmp_path)
    batch = await samples_of(policy, range(6))
    trained = trainer(tmp_path, reward_type, logprob_type=logprob_type)
    chunks = chunks_of(batch, PPO, reward_type, logprob_type)
    weight = float(chunks.counted.sum())
    rows = torch.arange(len(chunks.episode))
    found = loss_of(trained.policy.model, chunks, rows, trained.algorithm, normalizer=weight)
    assert float(found.sums["clip_fraction"]) == 0 and float(found.sums["kl/update"]) / weight < 1e-9
    assert chunks.logprobs.shape[1:] == {"": (), "token_level": (2, 1)}[logprob_type]
    assert weight == float(chunks.played.sum()) if logprob_type else weight == len(rows)
    before = trained.weights_digest()
    first = trained.train_step(batch, 1)
    assert first.metrics["kl/update"] > 0 and trained.weights_digest() != before
    trained.write_weights(tmp_path / "weights")
    loaded: Any = load_policy(str(tmp_path / "weights"), device="cpu", trust_remote_code=False)
    assert torch.equal(loaded.value_head.weight, trained.policy.model.value_head.weight)


async def test_each_token_has_the_advantage_of_its_chunk_or_action(tmp_path: Path) -> None:
    batch = await samples_of(token_actor(), range(6))
    for reward_type in ("chunk_level", "action_level"):
        whole, tokens = (chunks_of(batch, PPO, reward_type, level) for level in ("", "token_level"))
        assert torch.equal(tokens.counted[..., 0], whole.played)
        wanted = whole.advantages if reward_type == "action_level" else whole.advantages[:, None].expand(-1, 2)
        assert torch.equal(tokens.advantages[..., 0], wanted)
        sums = (tokens.logprobs[..., 0] * whole.played).sum(-1)
        assert torch.allclose(sums, whole.logprobs if reward_type == "chunk_level" else (whole.logprobs * whole.played).sum(-1))
