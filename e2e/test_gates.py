"""A gate stops a run at the step where its condition first holds, also if `rolloutd` is killed, and
also if that was while reserved workers evaluated, or while suites were evaluated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest
from mesh import ROOT, Mesh, until
from sim import Job, audited, finish, sim_mesh, stop, submit

from rollout.run.v1 import run_pb2
from rollout.snapshot.v1 import snapshot_pb2
from rollout.storage.v1 import storage_pb2

STEPS = 10
METRIC = "reward/mean"


def events(running: Mesh, run: str, kind: str) -> list:
    wanted = storage_pb2.EventFilter(run_id=run, kinds=[kind])
    return list(running.events.ListEvents(storage_pb2.ListEventsRequest(filter=wanted, page_size=1000)).events)


def shown(running: Mesh, *arguments: str) -> str:
    command = [str(ROOT / "bin" / "rollout"), *arguments, "--state-dir", str(running.state)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def gated(job: Job, limit: float) -> Path:
    path = job.write()
    gates = f"""
[gates.reached]
when = "{METRIC} >= {limit!r}"
action = "stop"

[gates.started]
when = "samples > 0"
action = "promote"
"""
    path.write_text(path.read_text() + gates)
    return path


def test_a_gate_stops_the_run_at_its_step_although_rolloutd_is_killed(tmp_path: Path) -> None:
    plain = Job(tmp_path / "plain", steps=STEPS)
    running = sim_mesh(tmp_path / "reference").start()
    try:
        run = submit(running, running.plan(plain.write()), plain)
        finish(running, run)
        rewards = {event.step: event.metrics[METRIC] for event in events(running, run, "step.committed")}
        digests = {record.step: record.weights_digest for record in running.ledger(run)[1]}
    finally:
        stop(running)
    # the last step with the best reward so far: there are steps to kill at before it, and steps
    # after it
    wanted = max(step for step in range(4, plain.steps) if rewards[step] > max(rewards[s] for s in range(1, step)))

    job = Job(tmp_path / "job", steps=STEPS)
    running = sim_mesh(tmp_path / "killed", seconds=0.05).start()
    try:
        run = submit(running, running.plan(gated(job, rewards[wanted])), job)
        for step in (1, wanted - 1):
            running.until_step(run, step)
            running.kill("all")
            running.start()
            if running.status(run).run.state == run_pb2.RUN_STATE_INTERRUPTED:
                running.scheduler.ResumeRun(run_pb2.ResumeRunRequest(run_id=run))
        digest = finish(running, run)
        ended = running.status(run).run
        assert (ended.step, ended.reason, digest) == (wanted, "STOPPED_BY_GATE", digests[wanted])
        assert audited(running, run)["steps"] == wanted
        fired = {event.attributes["gate"]: event for event in events(running, run, "gate.fired")}
        assert {gate: event.step for gate, event in fired.items()} == {"started": 1, "reached": wanted}
        assert len(events(running, run, "gate.fired")) == 2, "a gate fires once"
        assert fired["reached"].metrics["value"] == rewards[wanted]
        listed = running.snapshots.ListSnapshots(snapshot_pb2.ListSnapshotsRequest(run_id=run)).snapshots
        assert {(s.step, s.name) for s in listed} >= {(1, "gate-started"), (wanted, "")}
        assert "STOPPED_BY_GATE" in shown(running, "runs", "show", run)
        assert json.loads(shown(running, "runs", "show", run, "--format", "json"))["run"]["reason"] == "STOPPED_BY_GATE"
    finally:
        stop(running)


# The reward of held-out rows hangs while a file exists.
HELD = """

_scored = letters


def letters(samples):
    import time

    held = pathlib.Path(__file__).with_name("held")
    while samples[0].prompt.startswith("held") and held.exists():
        time.sleep(0.02)
    return _scored(samples)
"""

EVALUATED = """
[eval]
every_steps = 4
workers = 1

[gates.answers]
when = "eval/reward >= 0"
action = "stop"
"""


def test_an_evaluation_that_a_kill_interrupts_is_repeated(tmp_path: Path) -> None:
    """The workers exit with `rolloutd`, so that the weights of the evaluation are made again."""
    job = Job(tmp_path / "job", steps=30, workers=2, snapshot=20)
    path = job.write()
    text = path.read_text().replace('train = "train.jsonl"', 'train = "train.jsonl"\neval = "held.jsonl"')
    path.write_text(text + EVALUATED)
    (job.folder / "held.jsonl").write_text("".join(json.dumps({"prompt": f"held {n}:"}) + "\n" for n in range(4)))
    with (job.folder / "reward.py").open("a") as file:
        file.write(HELD)
    held = job.folder / "held"
    running = sim_mesh(tmp_path / "state", seconds=0.3).start()
    try:
        run = submit(running, running.plan(path), job)
        until(lambda: bool(events(running, run, "eval.finished")), "the evaluation before the first step", 60)
        held.touch()
        running.until_step(run, 6)  # the evaluation of step 4 hangs
        running.kill("all")
        running.start()
        if running.status(run).run.state == run_pb2.RUN_STATE_INTERRUPTED:
            running.scheduler.ResumeRun(run_pb2.ResumeRunRequest(run_id=run))
        running.until_step(run, 7)
        assert not events(running, run, "gate.fired")
        held.unlink()
        finish(running, run)
        ended = running.status(run).run
        assert ended.reason == "STOPPED_BY_GATE" and ended.step <= 8, ended
        assert {event.step for event in events(running, run, "gate.fired")} == {4}
        assert [event.step for event in events(running, run, "eval.finished")][:2] == [0, 4]
        assert not events(running, run, "eval.skipped")
        audited(running, run)
    finally:
        held.unlink(missing_ok=True)
        stop(running)


SUITES = """
[eval]
every_steps = 4
{workers}

[eval.suites.letters]
data = "held.jsonl"
samples = 3
metrics = ["mean", "pass@1", "pass@3"]
pass_score = 0.5

[eval.suites.words]
data = "held.jsonl"
reward = {{ expression = "double(size(completion))" }}

[eval.suites.chat]
data = "held.jsonl"
samples = 2
metrics = ["win_rate"]
baseline = "base.jsonl"
reward = {{ plugin = "judge.py:longer" }}

[gates.answers]
when = "eval/letters/pass@3 >= 0"
action = "stop"

[gates.wins]
when = "eval/chat/win_rate >= 0.5"
action = "stop"
"""

JUDGE = """
def longer(samples):
    assert all(sample.row["baseline"] == sample.prompt[5] for sample in samples)
    return [0.5 + 0.5 * (len(sample.completion) > 1) for sample in samples]
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_suites_of_a_run_are_evaluated_and_judged_also_across_a_kill(tmp_path: Path, workers: int) -> None:
    """On a shared worker between two steps, and on a reserved worker that a kill interrupts."""
    job = Job(tmp_path / "job", steps=30, workers=2, snapshot=20)
    path = job.write()
    path.write_text(path.read_text() + SUITES.format(workers=f"workers = {workers}" if workers else ""))
    rows = [{"prompt": f"held {n}:"} for n in range(4)]
    (job.folder / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answered = ({"row": n, "completion": str(n), "data": row} for n, row in enumerate(rows))
    (job.folder / "base.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answered))
    (job.folder / "judge.py").write_text(JUDGE)
    with (job.folder / "reward.py").open("a") as file:
        file.write(HELD)
    held = job.folder / "held"
    running = sim_mesh(tmp_path / "state", seconds=0.3).start()
    try:
        run = submit(running, running.plan(path), job)
        until(lambda: bool(events(running, run, "eval.finished")), "the evaluation before the first step", 60)
        held.touch()
        running.until_step(run, 6 if workers else 4)  # the evaluation of step 4 hangs
        running.kill("all")
        running.start()
        if running.status(run).run.state == run_pb2.RUN_STATE_INTERRUPTED:
            running.scheduler.ResumeRun(run_pb2.ResumeRunRequest(run_id=run))
        assert not events(running, run, "gate.fired")
        held.unlink()
        finish(running, run)
        assert running.status(run).run.reason == "STOPPED_BY_GATE"
        fired = events(running, run, "gate.fired")
        assert sorted((event.attributes["gate"], event.step) for event in fired) == [("answers", 4), ("wins", 4)]
        first, second = events(running, run, "eval.finished")[:2]
        assert (first.step, second.step) == (0, 4)
        for event in (first, second):
            assert (event.metrics["eval/letters/samples"], event.metrics["eval/letters/failed"]) == (12, 0)
            assert event.metrics["eval/letters/pass@3"] >= event.metrics["eval/letters/pass@1"] >= 0
            assert event.metrics["eval/words/samples"] == 4 and event.metrics["eval/words/mean"] > 0
            assert "eval/reward" not in event.metrics, "there are no other held-out rows"
            assert (event.metrics["eval/chat/samples"], event.metrics["eval/chat/failed"]) == (8, 0)
            assert 0.5 <= event.metrics["eval/chat/win_rate"] <= 1
            _, letters, words = json.loads(event.attributes["suites"])
            assert (letters["suite"], words["suite"], letters["rows"]) == ("letters", "words", 4)
            assert all(
                metric["low"] <= metric["value"] <= metric["high"] for metric in letters["metrics"] if metric["low"] is not None
            )
        assert "suite letters: mean" in shown(running, "logs", "tail", run, "--kind", "eval.finished")
        assert "letters/pass@3" in shown(running, "runs", "show", run)
        audited(running, run)
    finally:
        held.unlink(missing_ok=True)
        stop(running)


RESTORED = """
[gates.worse]
when = "no improvement of reward/mean in 2 steps"
action = "restore_best"
"""


def has_fired(running: Mesh, run: str) -> bool:
    return bool(events(running, run, "gate.fired"))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_gate_restores_the_best_snapshot_also_across_kills(tmp_path: Path, mode: str) -> None:
    """In a run that promises bits, kills change nothing. In every run the weights of the best step
    are those of a new lineage, from the step of the gate on."""
    ends = []
    for kills in (False, True):
        job = Job(tmp_path / f"job-{kills}", steps=STEPS + 4, mode=mode, staleness=0 if mode == "sync" else 1)
        path = job.write()
        text = path.read_text().replace("[snapshot]\n", '[snapshot]\nbest = "reward/mean"\n')
        path.write_text(text + RESTORED)
        running = sim_mesh(tmp_path / f"mesh-{kills}", seconds=0.05 if kills else 0.0).start()
        try:
            run = submit(running, running.plan(path), job)
            victims = ["learner", "all"] if kills else []
            while victims:
                until(partial(has_fired, running, run), "the gate to fire", 60)
                victim = victims.pop(0)
                if victim == "all":
                    running.kill("all")
                    running.start()
                else:
                    (learner,) = (worker for worker in running.status(run).workers if worker.kind == "learner")
                    os.kill(learner.pid, signal.SIGKILL)
                if running.status(run).run.state == run_pb2.RUN_STATE_INTERRUPTED:
                    running.scheduler.ResumeRun(run_pb2.ResumeRunRequest(run_id=run))
            digest = finish(running, run)
            (fired,) = events(running, run, "gate.fired")
            (restored,) = events(running, run, "gate.restored")
            best = int(restored.metrics["from_step"])
            assert restored.step == fired.step == best + 2, "two steps did not improve on the best one"
            report = audited(running, run)
            assert report["steps"] == job.steps
            made = {record.step: record.weights_digest for record in running.ledger(run)[1]}
            assert restored.attributes["digest"] == made[best] != made[fired.step]
            listed = running.snapshots.ListSnapshots(snapshot_pb2.ListSnapshotsRequest(run_id=run)).snapshots
            assert any(s.name == "best" and s.step >= best for s in listed), "a later step may be better still"
            assert report["lineages"], "the restored weights begin a lineage"
            ends.append((fired.step, digest))
        finally:
            stop(running)
    if mode == "sync":
        assert ends[0] == ends[1]
