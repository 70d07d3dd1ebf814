"""Makes an untrained policy and the rows of its episodes:

    python examples/multistep/prepare.py --observations 4 --actions 2 --chunk 4 models/cartpole
    python examples/multistep/prepare.py --observations 3 --actions 1 --continuous models/pendulum

writes the policy to the folder, and the rows of `episodes.jsonl` and `heldout.jsonl` into it. With
--tokens, actions are tokens of a language model: an untrained one, or the one in the folder
--language-model:

    python examples/multistep/prepare.py --observations 4 --limits 2.4 3 0.21 3 --actions 2 --tokens models/cartpole-tokens
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from rollout_workers.multistep.actor_critic import ActorCritic, ActorCriticConfig
from rollout_workers.multistep.token_actor import TokenActor, TokenActorConfig


def token_actor(given: argparse.Namespace) -> TokenActor:
    """A policy around a language model, trained or not."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    if given.language_model:
        model = AutoConfig.from_pretrained(given.language_model)
    else:
        model = LlamaConfig(
            vocab_size=given.bins + (given.action_bins if given.continuous else given.actions),
            hidden_size=given.hidden,
            intermediate_size=2 * given.hidden,
            num_hidden_layers=2,
            num_attention_heads=4,
            tie_word_embeddings=False,
        )
    prompt = None
    if given.prompt:
        prompt = AutoTokenizer.from_pretrained(given.language_model)(given.prompt)["input_ids"]
    shape = TokenActorConfig(
        language_model=model.to_dict(),
        prompt_ids=prompt,
        observation_size=given.observations,
        observation_bins=given.bins,
        observation_limits=given.limits,
        action_size=given.actions,
        action_bins=given.action_bins,
        action_limits=given.action_limits,
        continuous=given.continuous,
        chunk=given.chunk,
        value_columns=given.chunk if given.action_values else 1,
    )
    policy = TokenActor(shape)
    if given.language_model:
        weights = AutoModelForCausalLM.from_pretrained(given.language_model, dtype=torch.float32).state_dict()
        policy.language_model.load_state_dict(weights)
    return policy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--observations", type=int, required=True, help="numbers of an observation")
    parser.add_argument("--actions", type=int, required=True, help="discrete actions, or numbers of a continuous one")
    parser.add_argument("--continuous", action="store_true")
    parser.add_argument("--chunk", type=int, default=1, help="actions that the policy chooses at once")
    parser.add_argument("--action-values", action="store_true", help="a value of each action, for action_level")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--episodes", type=int, default=256, help="rows; the environment's seed differs in each epoch")
    parser.add_argument("--held-out", type=int, default=32, help="rows of evaluations")
    parser.add_argument("--seed", type=int, default=0)
    tokens = parser.add_argument_group("actions as tokens of a language model")
    tokens.add_argument("--tokens", action="store_true")
    tokens.add_argument("--language-model", type=Path, help="folder of a causal language model (default: a small untrained one)")
    tokens.add_argument("--prompt", help="text before each observation, such as an instruction, for --language-model")
    tokens.add_argument("--bins", type=int, default=64, help="tokens for a number of an observation")
    tokens.add_argument("--limits", type=float, nargs="+", help="the largest numbers of an observation (default: 1 each)")
    tokens.add_argument("--action-bins", type=int, default=64, help="tokens for a number of a continuous action")
    tokens.add_argument("--action-limits", type=float, nargs="+", help="the largest numbers of an action (default: 1 each)")
    given = parser.parse_args()
    for name, size in (("limits", given.observations), ("action_limits", given.actions)):
        if (limits := getattr(given, name)) and len(limits) != size:
            parser.error(f"--{name.replace('_', '-')} takes {size} numbers")
    if given.prompt and not given.language_model:
        parser.error("--prompt needs --language-model, whose tokenizer reads it")
    torch.manual_seed(given.seed)
    shape = ActorCriticConfig(
        observation_size=given.observations,
        action_size=given.actions,
        continuous=given.continuous,
        chunk=given.chunk,
        value_columns=given.chunk if given.action_values else 1,
        hidden_size=given.hidden,
    )
    policy = token_actor(given) if given.tokens or given.language_model else ActorCritic(shape)
    policy.save_pretrained(given.folder)
    rows = "".join(json.dumps({"episode": number}) + "\n" for number in range(given.episodes))
    (given.folder / "episodes.jsonl").write_text(rows)
    held_out = "".join(json.dumps({"held_out": number}) + "\n" for number in range(given.held_out))
    (given.folder / "heldout.jsonl").write_text(held_out)
    print(f"wrote a policy and {given.episodes} rows to {given.folder}")
