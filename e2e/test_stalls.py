"""An engine or a trainer hangs. The worker notices that it makes no progress and exits, and is
restarted; its groups move."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sim import Job, audited, finish, journals_agree, sim_mesh, stop, submit

from rollout.storage.v1 import storage_pb2

REASONS = {"engine": "the engine has samples and computed no token", "trainer": "the learner finished no micro-batch of its step"}


@pytest.mark.parametrize("part", REASONS)
def test_a_worker_that_hangs_is_restarted(part: str, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", steps=6, stall_seconds=4)
    hangs = tmp_path / "hangs"
    hangs.mkdir()
    (hangs / part).touch()
    running = sim_mesh(tmp_path / "state", seconds=0.05, ROLLOUT_SIM_HANG=str(hangs)).start()
    try:
        run = submit(running, running.plan(job.write()), job)
        finish(running, run)
        assert not (hangs / part).exists()
        assert audited(running, run)["whole"]
        journals_agree(running, run, job)
        wanted = storage_pb2.ListEventsRequest(filter=storage_pb2.EventFilter(run_id=run, kinds=["worker.exited"]))
        exits = [event.message for event in running.events.ListEvents(wanted).events]
        assert len(exits) == 1, exits
        worker = "inference-[01]" if part == "engine" else "learner-0"
        said = rf"{worker} made no progress and stopped itself \(exit code 4\): {REASONS[part]} "
        said += r"for \d+ s \(limits.stall_seconds = 4\)"
        assert re.fullmatch(said, exits[0]), exits
    finally:
        stop(running)
