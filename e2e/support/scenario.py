"""The scenario that every shape must pass."""

from __future__ import annotations

from pathlib import Path

import openai
from conftest import GROUPS, SAMPLES, STEPS
from mesh import Mesh, assert_consumed_once

from rollout.inference.v1 import inference_pb2
from rollout.learner.v1 import learner_pb2

SLOW = 'reward.plugin="reward.py:slow_digit_share"'


def six_steps(running: Mesh, config: Path) -> str:
    """Run the small job to its end: the gateway answers, workers have the weights of the ledger,
    and each prompt is consumed once. Returns the last weights digest."""
    run = running.submit(config, SLOW)
    near_end = running.until_step(run, STEPS - 1)
    workers = {worker.kind: worker for worker in near_end.workers}
    client = openai.OpenAI(base_url=f"{running.daemon('rollout-gateway')['gateway']}/v1", api_key="none")
    name = client.models.list().data[0].id
    answer = client.completions.create(model=name, prompt="17+25=", max_tokens=4, temperature=0)
    assert answer.choices[0].finish_reason in ("stop", "length")
    inference = running.inference(run, workers["inference"].address)
    learner = running.learner(run, workers["learner"].address)
    receipt = inference.GetInferenceStatus(inference_pb2.GetInferenceStatusRequest()).receipt
    held = learner.GetLearnerStatus(learner_pb2.GetLearnerStatusRequest())
    finished = running.finish(run)
    _, steps, _ = running.ledger(run)
    digests = {record.step: record.weights_digest for record in steps}
    assert receipt.digest == digests[receipt.version]
    assert held.weights_digest == digests[held.step]
    digest = assert_consumed_once(running, run, steps=STEPS, groups_per_step=GROUPS, group_size=SAMPLES)
    assert finished.weights_digest == digest
    return digest
