"""Open episodes that survive their worker: they continue after their last completed turn, also in a
run that is restored from a snapshot of them."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mesh import Mesh, until
from sim import GROUPS, SAMPLES, Job, audited, finish, sim_mesh, stop, submit
from test_snapshots import rollout

from rollout.snapshot.v1 import snapshot_pb2

WORKER = ("--worker", f"{sys.executable} -m rollout_testing.sim")


def played(job: Job) -> Counter[tuple[int, int, int]]:
    """How often each turn of each sample was played: (row, sample, turn)."""
    lines = (job.folder / "played").read_text().splitlines()
    return Counter((row, sample, turn) for row, sample, turn, _ in map(json.loads, lines))


def saved(running: Mesh, run: str) -> Sequence[snapshot_pb2.Episode]:
    """The open episodes of a run."""
    return running.snapshots.ListEpisodes(snapshot_pb2.ListEpisodesRequest(run_id=run, page_size=1000)).episodes


def test_episodes_continue_after_the_crash_of_their_worker(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", steps=3, turns=True, saves=True, snapshot=10)
    running = sim_mesh(tmp_path / "state").start()
    try:
        lock = running.plan(job.write())
        digest = finish(running, submit(running, lock, job))
        (job.folder / "played").unlink()

        (job.folder / "wait").touch()  # before the second turn of every episode
        run = submit(running, lock, job)
        until(lambda: len(saved(running, run)) == GROUPS * SAMPLES, "all episodes of a step to be saved", 60)
        state = tmp_path / "state"
        listed = rollout(state, "episodes", "list", run)["episodes"]
        assert len(listed) == GROUPS * SAMPLES and {episode["turns"] for episode in listed} == {1}
        key = listed[0]["key"]
        name = f"{key['epoch']}/{key['index']}/{key['sample']}"
        shown = rollout(state, "episodes", "show", run, name)
        assert [turn["sampled"] for turn in shown["trajectory"]["turns"]] == [False, True, False]
        workers = [worker for worker in running.status(run).workers if worker.kind == "inference"]
        for worker in workers:
            os.kill(worker.pid, signal.SIGKILL)
        before = (job.folder / "played").read_text()
        played_again = rollout(state, "episodes", "replay", run, name, *WORKER)
        assert played_again["same"] and [step["turn"] for step in played_again["steps"]] == [0, 1]
        (job.folder / "played").write_text(before)
        (job.folder / "wait").unlink()
        assert finish(running, run) == digest, "the episodes continue with other bits"
        audited(running, run)
        assert set(played(job).values()) == {1}, "a turn was played again"
        until(lambda: not saved(running, run), "the episodes of finished groups to be deleted", 20)
    finally:
        stop(running)


def test_a_snapshot_of_episodes_branches_and_continues_elsewhere(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", steps=20, mode="async", staleness=3, turns=True, saves=True, snapshot=50, keep_payloads=True)
    here, there, exported = tmp_path / "here", tmp_path / "there", tmp_path / "episodes.tar"
    running = sim_mesh(here, seconds=0.2).start()
    try:
        run = submit(running, running.plan(job.write()), job)
        for attempt in range(5):  # until an episode was between two turns at the cut
            [taken] = rollout(here, "snapshot", "create", run, "--kind", "episodic", "--name", f"cut{attempt}")["snapshots"]
            episodes = rollout(here, "episodes", "list", taken["snapshot_id"])["episodes"]
            if episodes:
                break
        assert episodes, "no cut had an open episode with a turn"
        assert rollout(here, "snapshot", "verify", taken["snapshot_id"]).get("flaws", []) == []
        key = episodes[0]["key"]
        name = f"{key['epoch']}/{key['index']}/{key['sample']}"
        branches = rollout(here, "episodes", "branch", taken["snapshot_id"], name, "--branches", "3", *WORKER)["branches"]
        assert {branch["outcome"] for branch in branches} <= {"completed", "truncated"}  # at the token limit
        assert len({json.dumps(branch["turns"]) for branch in branches}) == 3, "the branches are the same"
        rollout(here, "snapshot", "export", taken["snapshot_id"], "--to", str(exported))
    finally:
        stop(running)

    (job.folder / "played").unlink()
    running = sim_mesh(there, seconds=0.01).start()
    try:
        imported = rollout(there, "snapshot", "import", str(exported), "--inputs", str(tmp_path / "inputs"))["snapshot_id"]
        assert len(rollout(there, "episodes", "list", imported)["episodes"]) == len(episodes)
        restored = rollout(there, "snapshot", "restore", imported, "--detach")["run_id"]
        finish(running, restored)
        audited(running, restored)
        assert (tmp_path / "inputs" / "played").exists(), "nothing was played"
    finally:
        stop(running)
