"""What works on an engine besides rollouts: evaluations, `infer batch`, teachers, judges, and the
restart of an engine that is stopped. Run by `make check-engines` for the engines that have separate
environments, with the tiny model.

A judge is a reward that asks a model behind an endpoint; here that is the policy of the first run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import GROUPS, ROOT, SAMPLES
from mesh import Mesh, assert_consumed_once, mesh, until
from planted import Stalled
from scenario import SLOW
from test_teaching import STUDENT

from rollout.client import connect
from rollout.run.v1 import run_pb2

ENGINES = os.environ.get("ENGINES", "vllm sglang").split()
JUDGE = '''
import json, urllib.request

def judged(samples):
    """How likely the other policy is to start with a digit after a completion."""
    body = {"model": MODEL, "prompt": [sample.completion or "1" for sample in samples], "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(URL, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        choices = sorted(json.load(answer)["choices"], key=lambda choice: choice["index"])
    assert len(choices) == len(samples)
    return [float(choice["text"][:1].isdigit()) + len(sample.completion) / 10 for choice, sample in zip(choices, samples)]
'''


def settings(engine: str) -> tuple[str, ...]:
    return (f"engine.kind={engine}", f"engine.python={ROOT}/.tools/{engine}/bin/python", "limits.worker_start_seconds=900")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", ENGINES)
def test_everything_that_samples_works_on_the_engine(config: Path, tmp_path: Path, engine: str) -> None:
    with mesh(tmp_path / "state") as running:
        first = running.submit(config, SLOW, "train.steps=99", "eval.every_steps=1", *settings(engine))
        running.until_step(first, 2)
        running.scheduler.PauseRun(run_pb2.PauseRunRequest(run_id=first))  # its worker continues to serve
        with connect(state=running.state) as client:
            assert len(client.metrics(first, ["eval/reward"])["eval/reward"]) >= 2
        gateway = str(running.daemon("rollout-gateway")["gateway"])
        for protocol in ("echo", "prompt_logprobs"):
            teaches(running, tmp_path, gateway, first, protocol)
        judges(running, tmp_path, config, gateway, first)
    infers(config, tmp_path, engine)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_stopped_engine_is_fenced_and_its_groups_move(config: Path, tmp_path: Path, engine: str) -> None:
    """The engine computes in the process of its worker. `rollout explain` names the stopped one."""
    with mesh(tmp_path / "state") as running:
        run = running.submit(config, SLOW, "train.steps=999", "engine.workers=2", "limits.stall_seconds=20", *settings(engine))
        running.until_step(run, 1)
        job = Stalled(running, run, tmp_path)
        stopped = job.worker("inference-0")
        os.kill(stopped.pid, signal.SIGSTOP)
        began = time.monotonic()
        root = job.root(lambda wait: wait["reason"] == "WORKER_STOPPED", "the stopped engine", 60)
        assert "inference-0" in root["evidence"] and f"kill -CONT {stopped.pid}" in root["fix"], root
        named = time.monotonic() - began
        until(lambda: job.worker("inference-0").process_id not in ("", stopped.process_id), "a new engine", 300)
        restarted = time.monotonic() - began
        running.until_step(run, running.status(run).run.step + 2)
        moved = time.monotonic() - began
        print(f"{engine}: named after {named:.1f} s, restarted after {restarted:.1f} s, two steps later after {moved:.1f} s")
        running.scheduler.CancelRun(run_pb2.CancelRunRequest(run_id=run))


def teaches(running: Mesh, folder: Path, gateway: str, teacher: str, protocol: str) -> None:
    """The policy of a run is the teacher of another one."""
    job = folder / f"{protocol}.toml"
    sizes = {"steps": 1, "groups": GROUPS, "samples": SAMPLES}
    job.write_text(STUDENT.format(models=ROOT / "models", gateway=gateway, teacher=teacher, protocol=protocol, **sizes))
    run = running.submit(job)
    running.finish(run)
    assert_consumed_once(running, run, steps=1, groups_per_step=GROUPS, group_size=SAMPLES)


def judges(running: Mesh, folder: Path, config: Path, gateway: str, model: str) -> None:
    """The policy of a run judges the samples of another one."""
    (folder / "judge.py").write_text(JUDGE.replace("MODEL", repr(model)).replace("URL", repr(f"{gateway}/v1/completions")))
    job = folder / "judged.toml"
    job.write_text(
        config.read_text().replace("../models", str(ROOT / "models")).replace("reward.py:digit_share", "judge.py:judged")
    )
    run = running.submit(job, "train.steps=1", "eval.every_steps=0")
    running.finish(run)
    assert_consumed_once(running, run, steps=1, groups_per_step=GROUPS, group_size=SAMPLES)


def infers(config: Path, folder: Path, engine: str) -> None:
    """`rollout infer batch` scores the held-out prompts."""
    output = folder / "answers.jsonl"
    overrides = [word for setting in settings(engine) if setting.startswith("engine.") for word in ("--set", setting)]
    command = [ROOT / "bin" / "rollout", "infer", "batch", "--config", config, "--output", output, "--limit", "8", *overrides]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == 8 and all(row["score"] is not None and row["model_digest"] for row in rows)
