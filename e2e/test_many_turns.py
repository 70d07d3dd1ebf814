"""Episodes of many turns end with the same bits after kills, an asynchronous run can be trained
again from its log, and trajectories consist of exactly the ids that engines returned."""

from __future__ import annotations

import os
import signal
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from mesh import ROOT, Mesh
from recording import ids_agree, trained
from sim import Job, audited, finish, journals_agree, replay, sim_mesh, stop, submit

from rollout.gateway.v1 import gateway_pb2
from rollout.gateway.v1.gateway_pb2_grpc import RolloutGatewayServiceStub
from rollout.inference.v1 import inference_pb2
from rollout.run.v1 import run_pb2
from rollout.trajectory.v1.trajectory_pb2 import Trajectory
from rollout_testing.processes import children


def workers(status: run_pb2.RunStatus) -> dict[str, int]:
    return {worker.kind: worker.pid for worker in status.workers}


def kill_everything(running: Mesh, run: str, steps: tuple[int, ...]) -> None:
    """Kill the processes of the environment, an inference worker, the learner, and the services,
    each after a step, and resume the run."""
    for pid in children(workers(running.until_step(run, steps[0]))["inference"], "rollout.hosting.child"):
        os.kill(pid, signal.SIGKILL)
    os.kill(workers(running.until_step(run, steps[1]))["inference"], signal.SIGKILL)
    os.kill(workers(running.until_step(run, steps[2]))["learner"], signal.SIGKILL)
    running.until_step(run, steps[3])
    running.kill("all")
    running.start()
    assert running.status(run).run.state == run_pb2.RUN_STATE_INTERRUPTED
    running.scheduler.ResumeRun(run_pb2.ResumeRunRequest(run_id=run))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_kills_between_turns_without_a_model(mode: str, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", mode=mode, staleness=2 if mode == "async" else 0, turns=True, keep_payloads=True)
    running = sim_mesh(tmp_path / "state", seconds=0.05).start()
    try:
        lock = running.plan(job.write())
        reference = submit(running, lock, job)
        digest = finish(running, reference)
        run = submit(running, lock, job)
        kill_everything(running, run, (3, 6, 10, 14))
        ended = finish(running, run)
        assert mode == "async" or ended == digest
        for each in (reference, run):
            assert audited(running, each)["whole"]
            figures = journals_agree(running, each, job)
            trajectories, parts = ids_agree(running, each)
            assert trajectories == figures["trained"] == 20 * 4 * 3 and parts > 2 * trajectories
        running.stop()
        replayed = replay(running, run)
    finally:
        stop(running)
    assert replayed["same"] and replayed["steps"][-1]["step"] == job.steps, replayed


def test_child_sessions_are_trajectories_of_their_sample(tmp_path: Path) -> None:
    """Each is a part of the sample whose episode opened it. Two runs have the same bits."""
    job = Job(tmp_path / "job", steps=5, turns=True, helpers=True, keep_payloads=True)
    running = sim_mesh(tmp_path / "state").start()
    try:
        lock = running.plan(job.write())
        runs = [submit(running, lock, job) for _ in range(2)]
        assert len({finish(running, run) for run in runs}) == 1
        assert audited(running, runs[0])["whole"]
        samples: dict[tuple[int, int], list[Trajectory]] = {}
        for trajectory in trained(running, runs[0]):
            samples.setdefault((trajectory.key.index, trajectory.key.sample), []).append(trajectory)
        assert len(samples) == 5 * 4 * 3
        for parent, *children in samples.values():
            assert 1 <= len(children) <= 3 and parent.metrics["episode/child_sessions"] == len(children)
            assert [child.key.part for child in children] == list(range(1, len(children) + 1))
            assert [(c.parent.part, c.parent.turn, c.parent.child) for c in children] == [(0, 0, n) for n in range(len(children))]
            assert [sum(turn.sampled for turn in c.turns) for c in children] == [2, 1, 1][: len(children)]
            assert children[0].parent.rewarded and children[0].reward == len(children[0].turns[1].text) / 8
            assert all(not c.parent.rewarded and c.reward == parent.reward for c in children[1:])
        trajectories, parts = ids_agree(running, runs[0])
        assert trajectories == sum(map(len, samples.values())) and parts > 2 * trajectories
        command = [str(ROOT / "bin" / "rollout"), "completions", runs[0], "--step", "1", "--state-dir", str(running.state)]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        assert "\n    child session 1, opened after turn 1" in shown, shown
        running.stop()
    finally:
        stop(running)


def test_the_ids_of_sessions_are_those_of_the_engines(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", steps=6, mode="async", staleness=2, agents=True, keep_payloads=True)
    running = sim_mesh(tmp_path / "state").start()
    try:
        run = submit(running, running.plan(job.write()), job)
        running.until_step(run, 0)
        play_sessions(running, run)
        finish(running, run)
        trajectories, parts = ids_agree(running, run)
        assert trajectories == 6 * 4 * (3 + 1) and parts > trajectories  # a fork in each group, also in one played again
        running.stop()
    finally:
        stop(running)


def play_sessions(running: Mesh, run: str) -> None:
    """Play every sample of a run in a session of the gateway."""
    gateway = RolloutGatewayServiceStub(running.channel(str(running.daemon("rollout-gateway")["grpc"])))
    with ThreadPoolExecutor(12) as pool:
        played: list[Future[None]] = []
        while True:
            request = gateway_pb2.NextPromptsRequest(model=run, max_groups=4, wait_seconds=5)
            answer = gateway.NextPrompts(request)
            played += [pool.submit(play, gateway, run, task) for task in answer.sessions]
            if answer.ended:
                for each in played:
                    each.result()
                return


def play(gateway: RolloutGatewayServiceStub, run: str, task: gateway_pb2.SessionTask) -> None:
    """A session of two to four turns. The first sample of a group repeats its first turn, which is
    a fork."""
    sample = task.key.sample

    def complete(prompt: list[int], seed: int) -> list[int]:
        request = gateway_pb2.CompleteRequest(
            model=run,
            session_id=task.session_id,
            params=inference_pb2.SamplingParams(seed=seed, max_tokens=12),
            prompts=[inference_pb2.Prompt(tokens=inference_pb2.TokenIds(ids=prompt))],
        )
        return [at for answer in gateway.Complete(request) for at in answer.piece.token_ids]

    ids = first = [ord(c) for c in f"{task.key.index}, {sample}:"]
    for turn in range(2 + sample):
        ids = [*ids, *complete(ids, turn), ord("0") + turn]
    if sample == 0:
        complete(first, 9)
    gateway.CloseSession(gateway_pb2.CloseSessionRequest(session_id=task.session_id, reward=sample / 2, run_id=run))
