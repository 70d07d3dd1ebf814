"""Makes an untrained policy and the rows of its episodes:

    python examples/multistep/prepare.py --observations 4 --actions 2 --chunk 4 models/cartpole
    python examples/multistep/prepare.py --observations 3 --actions 1 --continuous models/pendulum

writes the policy to the folder, and `episodes.jsonl` into it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from rollout_workers.multistep.actor_critic import ActorCritic, ActorCriticConfig

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
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    shape = ActorCriticConfig(
        observation_size=given.observations,
        action_size=given.actions,
        continuous=given.continuous,
        chunk=given.chunk,
        value_columns=given.chunk if given.action_values else 1,
        hidden_size=given.hidden,
    )
    ActorCritic(shape).save_pretrained(given.folder)
    rows = "".join(json.dumps({"episode": number}) + "\n" for number in range(given.episodes))
    (given.folder / "episodes.jsonl").write_text(rows)
    print(f"wrote a policy and {given.episodes} rows to {given.folder}")
