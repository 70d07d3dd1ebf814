"""The policy of one run is the teacher of another run, through the gateway that serves both."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import GROUPS, ROOT, SAMPLES
from mesh import assert_consumed_once, mesh
from scenario import SLOW

from rollout.client import connect
from rollout.run.v1 import run_pb2

STEPS = 12
STUDENT = """
name = "student"
seed = 3
deterministic = true

[model]
path = "{models}/addition"

[data]
train = "{models}/addition-data/train.jsonl"

[sampling]
group_size = {samples}
max_tokens = 6

[algorithm.distillation.endpoint]
base_url = "{gateway}/v1"
model = "{teacher}"
protocol = "{protocol}"

[train]
steps = {steps}
groups_per_step = {groups}
learning_rate = 3e-3
warmup_steps = 0

[engine]
slots = 32
max_model_len = 32
"""


@pytest.mark.timeout(600)  # the workers of three runs
def test_a_run_teaches_another(config: Path, tmp_path: Path) -> None:
    with mesh(tmp_path / "state") as running:
        teacher = running.submit(config, SLOW, "train.steps=99", "train.learning_rate=0.01")
        running.until_step(teacher, 5)
        running.scheduler.PauseRun(run_pb2.PauseRunRequest(run_id=teacher))  # its worker continues to serve
        gateway = str(running.daemon("rollout-gateway")["gateway"])

        def student(protocol: str, steps: int) -> str:
            job = tmp_path / f"{protocol}.toml"
            sizes = {"steps": steps, "groups": GROUPS, "samples": SAMPLES}
            job.write_text(STUDENT.format(models=ROOT / "models", gateway=gateway, teacher=teacher, protocol=protocol, **sizes))
            run = running.submit(job)
            running.finish(run)
            assert_consumed_once(running, run, steps=steps, groups_per_step=GROUPS, group_size=SAMPLES)
            return run

        echo, vllm = student("echo", STEPS), student("prompt_logprobs", 2)
        digests = [[step.weights_digest for step in running.ledger(run)[1]] for run in (echo, vllm)]
        assert digests[0][:2] == digests[1], "both protocols return the same logprobs"
        with connect(state=running.state) as client:
            apart = [value for _, value in client.metrics(echo, ["kl/teacher"])["kl/teacher"]]
        assert len(apart) == STEPS
        assert sum(apart[-3:]) < 0.7 * sum(apart[:3]), apart
