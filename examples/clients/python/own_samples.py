"""Put multi-turn samples of any sampler into a ledger and train on them with any learner.
Needs only the client and numpy; no worker of rollout runs.

python examples/clients/python/own_samples.py
"""

import argparse
import uuid
from pathlib import Path

import numpy as np

from rollout.client.buffer import Buffer, Ledger, Sample, connect
from rollout.trajectory.v1.trajectory_pb2 import OUTCOME_COMPLETED, Trajectory

GROUPS, GROUP_SIZE, STEPS = 4, 2, 2


def conversation(seed: int) -> Sample:
    """A made-up sample of two turns: question, answer, question, answer. Only tokens of the policy
    are in the loss, and only they have logprobs."""
    random = np.random.default_rng(seed)
    turns = [(5, False), (7, True), (4, False), (6, True)]  # (tokens, written by the policy)
    mask = np.concatenate([np.full(tokens, policy, np.uint8) for tokens, policy in turns])
    ids = random.integers(0, 1000, len(mask), dtype=np.int32)
    logprobs = np.where(mask, -random.random(len(mask)), 0).astype(np.float32)
    about = Trajectory(outcome=OUTCOME_COMPLETED, prompt_tokens=turns[0][0], reward=float(random.random()))
    return Sample(ids, logprobs, mask, about=about)


def produce(buffer: Buffer, run: str) -> None:
    with buffer.producer(run) as producer:
        for group in range(GROUPS):
            put = producer.put(group, [conversation(group * GROUP_SIZE + k) for k in range(GROUP_SIZE)])
            print(f"group {group}: {put.result().accepted} samples are durable")


def learn(buffer: Buffer, run: str) -> None:
    for step, batch in enumerate(buffer.consumer(run, steps=STEPS), 1):
        for group in batch.groups:
            rewards = np.array([sample.about.reward for sample in group])
            advantages = rewards - rewards.mean()
            for sample, advantage in zip(group, advantages, strict=True):
                trained = int(sample.loss_mask.sum())
                print(f"step {step}: advantage {advantage:+.2f} on {trained} of {len(sample.token_ids)} tokens")
        batch.commit(trim=True)  # a step exists when this returns; the next batch has other groups


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="feed own samples to an own learner")
    parser.add_argument("--state", type=Path, help="state folder of the local rolloutd (default: the usual one)")
    options = parser.parse_args()
    name = f"own-{uuid.uuid4().hex[:8]}"
    with connect(state=options.state) as ledger:
        ledger.open(name, Ledger(group_size=GROUP_SIZE, groups_per_step=GROUPS // STEPS, rows=GROUPS))
        produce(ledger, name)
        learn(ledger, name)
    print(f"`rollout audit {name}` verifies the ledger")
