"""A run whose calls of user code never end is cancelled in seconds, and `rollout explain` names the
call that it waits for."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from planted import flag, job_of
from sim import Job, audited, finish

from rollout.run.v1 import run_pb2

pytestmark = pytest.mark.slow

# A call that never ends, for the prompts of one data set.
_HANGS = """import pathlib
import threading

HANG = pathlib.Path(__file__).with_name("hang")


def letters(samples):
    if HANG.exists() and samples[0].prompt.startswith(HANG.read_text()):
        threading.Event().wait()
    return [1.0 for _ in samples]
"""


@pytest.mark.parametrize(("prompts", "workers"), [("", 0), ("held", 0), ("held", 1)], ids=["training", "evaluation", "reserved"])
def test_a_cancel_does_not_wait_for_a_reward_that_never_ends(prompts: str, workers: int, tmp_path: Path) -> None:
    """The cancelled run has every committed step once, and continues when it is resumed."""

    def edit(config: Path) -> None:
        config.with_name("reward.py").write_text(_HANGS)
        config.with_name("held.jsonl").write_text("".join(json.dumps({"prompt": f"held {n}:"}) + "\n" for n in range(4)))
        text = config.read_text().replace("retries = 0", "retries = 0\ntimeout_seconds = 3600")
        if prompts:
            text = text.replace('train = "train.jsonl"', 'train = "train.jsonl"\neval = "held.jsonl"')
            text += "\n[eval]\nevery_steps = 4\n" + (f"workers = {workers}\n" if workers else "")
        config.write_text(text)

    job = Job(tmp_path / "job", steps=12, workers=1 + workers, snapshot=3)
    with job_of(job, tmp_path / "state", edit=edit, seconds=0.3) as stalled:
        running, run = stalled.running, stalled.run
        with flag(stalled.folder / "hang", prompts):
            stalled.root(lambda wait: wait["reason"] == "REWARD_CALL", "the call that hangs", 60)
            began = time.monotonic()
            running.scheduler.CancelRun(run_pb2.CancelRunRequest(run_id=run, drain=True))
            named = False
            while (state := running.status(run).run.state) != run_pb2.RUN_STATE_CANCELLED:
                assert time.monotonic() - began < 30, run_pb2.RunState.Name(state)
                found = stalled.explained()
                named = named or any(wait["reason"] == "REWARD_CALL" for wait in found.get("chain", ()))
                time.sleep(0.1)
            took = time.monotonic() - began
            assert took < 15, f"the cancel took {took:.1f} s"
            assert named or not prompts, "explain did not name the call while the run drained"
        audited(running, run)
        running.scheduler.ResumeRun(run_pb2.ResumeRunRequest(run_id=run))
        finish(running, run)
        audited(running, run)
