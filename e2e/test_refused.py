"""A gradient that the learner refuses, with each policy: the batch is stored, the event
`step.refused` is emitted, and the run is paused, continues, or is rolled back."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from mesh import ENDED, ROOT, Mesh, describe, mesh, until
from sim import audited

from rollout.run.v1 import run_pb2
from rollout.storage.v1 import storage_pb2

STEPS, GROUPS, SAMPLES, BAD = 5, 4, 4, 4
CONFIG = """
name = "refused"
seed = 5
deterministic = true

[model]
path = "{models}/addition"

[data]
train = "rows.jsonl"
shuffle = false

[sampling]
group_size = {samples}
max_tokens = 6

[reward]
plugin = "spiked.py:spiked"

[algorithm.grpo]
normalize_std = false

[train]
steps = {steps}
groups_per_step = {groups}
learning_rate = 1e-3
warmup_steps = 0
refuse_grad_norm = 1e4
on_refused_gradient = "{policy}"

[engine]
slots = 16
max_model_len = 32

[snapshot]
every_steps = 2
"""
REWARD = '''"""A reward that makes the gradient explode at marked rows."""


def spiked(samples):
    shares = [sum(c.isdigit() for c in sample.completion) / max(1, len(sample.completion)) for sample in samples]
    return [share * (1e6 if sample.row["spiked"] else 1) for share, sample in zip(shares, samples)]
'''


def job(folder: Path, policy: str) -> Path:
    """A run in which the gradient of step BAD is refused, because the rows come in the order of the
    file."""
    folder.mkdir(parents=True)
    rows = [{"prompt": f"{n + 11}+{n + 23}=", "spiked": n // GROUPS == BAD - 1} for n in range(STEPS * GROUPS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "spiked.py").write_text(REWARD)
    path = folder / "job.toml"
    sizes = {"steps": STEPS, "groups": GROUPS, "samples": SAMPLES}
    path.write_text(CONFIG.format(models=ROOT / "models", policy=policy, **sizes))
    return path


def refusals(running: Mesh, run: str) -> list[dict[str, str]]:
    """The attributes of each `step.refused` of the run. Its step must be BAD."""
    wanted = storage_pb2.EventFilter(run_id=run, kinds=["step.refused"])
    events = running.events.ListEvents(storage_pb2.ListEventsRequest(filter=wanted)).events
    assert {event.step for event in events} <= {BAD}
    return [dict(event.attributes) for event in events]


def rollout(running: Mesh, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "bin" / "rollout"), *arguments, "--state-dir", str(running.state)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.usefixtures("config")
@pytest.mark.parametrize("policy", ["skip", "restore"])
def test_the_run_continues_without_the_refused_step(policy: str, tmp_path: Path) -> None:
    with mesh(tmp_path / "state") as running:
        run = running.submit(job(tmp_path / "job", policy))
        running.finish(run)
        digests = {record.step: record.weights_digest for record in running.ledger(run)[1]}
        assert audited(running, run)["whole"]
        (outcome,) = refusals(running, run)
        assert (outcome["reason"], outcome["action"]) == ("EXPLODING_GRADIENT", policy)
        assert len(np.load(outcome["batch"])["rewards"]) == GROUPS * SAMPLES
    assert len({digests[step] for step in (1, 2, 3, 5)}) == 4, "the other steps change the weights"
    assert digests[BAD] == digests[BAD - 1 if policy == "skip" else 2], digests


@pytest.mark.usefixtures("config")
def test_the_run_is_paused_until_a_user_resumes_it(tmp_path: Path) -> None:
    with mesh(tmp_path / "state") as running:
        watched = rollout(running, "run", "--config", str(job(tmp_path / "job", "stop")), "--no-report")
        run = running.scheduler.ListRuns(run_pb2.ListRunsRequest()).runs[0].run_id
        until(lambda: len(refusals(running, run)) == 1, "the event of the refusal", 30)  # the event may arrive after the pause
        (outcome,) = refusals(running, run)
        assert (outcome["reason"], outcome["action"]) == ("EXPLODING_GRADIENT", "stop")
        groups = np.load(outcome["batch"])["groups"]
        assert watched.returncode == 70, watched
        closing = watched.stdout[watched.stdout.rindex(f"refused {run}") :]
        for part in ("PAUSED after 3 of 5 steps", "EXPLODING_GRADIENT", outcome["batch"], f"rollout runs resume {run}"):
            assert part in closing, watched.stdout

        status = running.status(run)
        assert (status.run.state, status.run.reason, status.run.incarnation) == (run_pb2.RUN_STATE_PAUSED, outcome["reason"], 1)
        assert {worker.kind: worker.healthy for worker in status.workers} == {"inference": True, "learner": True}
        shown = rollout(running, "runs", "show", run).stdout
        assert "PAUSED" in shown and "EXPLODING_GRADIENT" in shown and outcome["batch"] in shown, shown

        resumed = rollout(running, "runs", "resume", run)
        assert resumed.returncode == 0, resumed
        for status in running.watch(run):  # the batch is recorded, so the same batch is refused again
            assert status.run.state not in ENDED, describe(status)
            if status.run.state == run_pb2.RUN_STATE_PAUSED:
                break
        assert (status.run.reason, status.run.incarnation, status.run.step) == (outcome["reason"], 2, BAD - 1)
        until(lambda: len(refusals(running, run)) == 2, "the event of the second refusal", 30)
        assert np.load(outcome["batch"])["groups"].tolist() == groups.tolist()

        assert rollout(running, "runs", "cancel", run).returncode == 0
        *_, last = running.watch(run)
        assert last.run.state == run_pb2.RUN_STATE_CANCELLED, describe(last)
        assert audited(running, run)["whole"]
