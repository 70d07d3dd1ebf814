"""Suites of a run that evaluations score: one of an installed package, and one of a sidecar."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest
from mesh import ROOT
from sim import Job, audited, finish, sim_mesh, stop, submit

from rollout.storage.v1 import storage_pb2
from rollout_testing.go import go_program

SUITES = """
[eval]
every_steps = 2

[eval.suites.letters]
data = "held.jsonl"
samples = 2
reward = { plugin = "acme-evals:letters" }

[eval.suites.ones]
data = "held.jsonl"
reward = { plugin = "ones.toml:slow" }
"""

CODE = """def letters(samples):
    return [0.25 for _ in samples]
"""


def package(site: Path) -> None:
    """A folder of an installed package, as pip leaves it."""
    info = site / "acme_evals-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-evals\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[rollout.plugins]\nevaluation.letters = acme_evals:letters\n")
    (info / "RECORD").write_text("acme_evals.py,,\nacme_evals-1.2.dist-info/METADATA,,\n")
    (site / "acme_evals.py").write_text(CODE)


def write(job: Job) -> Path:
    path = job.write()
    path.write_text(path.read_text() + SUITES)
    manifest = f'name = "slow"\nversion = "1.0.0"\nkind = "evaluation"\ncommand = ["{go_program("plugintest")}"]\n'
    path.with_name("ones.toml").write_text(manifest)
    path.with_name("held.jsonl").write_text("".join(json.dumps({"prompt": f"held {n}:"}) + "\n" for n in range(4)))
    return path


def test_evaluations_score_the_suites_of_a_run_and_no_reward(tmp_path: Path) -> None:
    package(tmp_path / "site")
    job = Job(tmp_path / "job", steps=4)
    config = write(job)
    running = sim_mesh(tmp_path / "state", PYTHONPATH=f"{ROOT / 'python'}:{tmp_path / 'site'}").start()
    try:
        lock = running.plan(config)
        run = submit(running, lock, job)
        finish(running, run)
        wanted = storage_pb2.ListEventsRequest(filter=storage_pb2.EventFilter(run_id=run, kinds=["eval.finished"]))
        events = running.events.ListEvents(wanted).events
        assert [event.step for event in events] == [0, 2, 4]
        for event in events:
            assert (event.metrics["eval/letters/samples"], event.metrics["eval/letters/mean"]) == (8, 0.25), event.metrics
            assert (event.metrics["eval/ones/samples"], event.metrics["eval/ones/mean"]) == (4, 1.0), event.metrics
        audited(running, run)
        for plugin, refusal in (
            ("acme-evals:letters", "has no reward `letters`"),
            ("ones.toml:slow", "`slow` is of the kind evaluation, but the configuration uses it as reward"),
        ):
            with pytest.raises(AssertionError, match=refusal):
                running.plan(config, f'reward.plugin="{plugin}"')
        (tmp_path / "site" / "acme_evals.py").write_text(CODE.replace("0.25", "0.5"))
        with pytest.raises(grpc.RpcError, match="an input of the plan has changed since the plan was made"):
            submit(running, lock, job)
    finally:
        stop(running)
