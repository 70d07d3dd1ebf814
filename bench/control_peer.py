"""The peer of bench/control.py: gymnasium's AsyncVectorEnv, in one process with the policy.

Reads lines "ENVIRONMENTS SECONDS" and prints the steps per second of each. An episode that ends is
reset in the same step, so every step counts.
"""

from __future__ import annotations

import sys
import time
from functools import partial

import gymnasium  # pyright: ignore[reportMissingImports]
from gymnasium.vector import AsyncVectorEnv, AutoresetMode  # pyright: ignore[reportMissingImports]


def main() -> None:
    envs = {}
    for count in map(int, sys.argv[2].split(",")):  # forked before torch starts threads
        make = [partial(gymnasium.make, sys.argv[3]) for _ in range(count)]
        envs[count] = AsyncVectorEnv(make, shared_memory=True, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
    import torch

    from rollout_workers.multistep.policy import load_policy

    torch.set_num_threads(1)
    policy = load_policy(sys.argv[1], device="cpu", trust_remote_code=False)
    print("ready", flush=True)
    for line in sys.stdin:
        count, seconds = line.split()
        vector, steps = envs[int(count)], 0
        observations, _ = vector.reset(seed=0)
        began = time.perf_counter()
        while time.perf_counter() - began < float(seconds):
            actions, _ = policy.predict_action_batch({"states": torch.from_numpy(observations)}, "train")
            observations, *_ = vector.step(actions[:, 0].numpy())
            steps += int(count)
        print(steps / (time.perf_counter() - began), flush=True)
    for vector in envs.values():
        vector.close()


if __name__ == "__main__":
    main()
