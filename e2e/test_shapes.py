"""The same job in both shapes: one process with every target, and one process a service."""

import urllib.request
from pathlib import Path

import openai
import pytest
from conftest import GROUPS, SAMPLES, STEPS
from mesh import assert_consumed_once, mesh

from rollout.inference.v1 import inference_pb2
from rollout.learner.v1 import learner_pb2

SLOW = 'reward.plugin="reward.py:slow_digit_share"'


@pytest.mark.parametrize("shape", ["all", "seven"])
def test_six_steps_end_to_end(shape: str, config: Path, tmp_path: Path) -> None:
    with mesh(tmp_path, shape) as running:
        run = running.submit(config, SLOW)
        near_end = running.until_step(run, STEPS - 1)
        workers = {worker.kind: worker for worker in near_end.workers}
        client = openai.OpenAI(base_url=f"{running.daemon('rollout-gateway')['gateway']}/v1", api_key="none")
        name = client.models.list().data[0].id
        answer = client.completions.create(model=name, prompt="17+25=", max_tokens=4, temperature=0)
        assert answer.choices[0].finish_reason in ("stop", "length")
        inference = running.inference(workers["inference"].address)
        learner = running.learner(workers["learner"].address)
        receipt = inference.GetInferenceStatus(inference_pb2.GetInferenceStatusRequest()).receipt
        held = learner.GetLearnerStatus(learner_pb2.GetLearnerStatusRequest())
        finished = running.finish(run)
        _, steps, _ = running.ledger(run)
        digests = {record.step: record.weights_digest for record in steps}
        assert receipt.digest == digests[receipt.version]
        assert held.weights_digest == digests[held.step]
        assert finished.weights_digest == assert_consumed_once(
            running, run, steps=STEPS, groups_per_step=GROUPS, group_size=SAMPLES
        )


def test_gateway_answers_with_the_new_version(config: Path, tmp_path: Path) -> None:
    with mesh(tmp_path) as running:
        run = running.submit(config, SLOW, "train.steps=8")
        url = f"{running.daemon('rollout-gateway')['gateway']}/v1/completions"
        seen = []
        for step in (2, 6):
            running.until_step(run, step)
            body = b'{"model": "digits", "prompt": "1+1=", "max_tokens": 2}'
            request = urllib.request.Request(url, body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=30) as response:
                seen.append(int(response.headers["x-rollout-weights-version"]))
        assert seen[0] >= 1 and seen[1] >= 5 and seen[1] > seen[0]
        running.finish(run)
