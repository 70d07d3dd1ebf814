"""A policy that acts for many steps is trained through the services: nothing is lost or trained
twice when processes are killed, and the digests are those of an undisturbed run."""

import os
import signal
from pathlib import Path

import pytest
from acting import GROUPS, HOSTED, SAMPLES, replay, write_job
from mesh import Mesh, assert_consumed_once, mesh, until
from planted import explained
from sim import audited

from rollout.run.v1 import run_pb2
from rollout.storage.v1 import storage_pb2

STEPS = 8


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("cartpole"), steps=STEPS)


def check(running: Mesh, run: str) -> str:
    digest = assert_consumed_once(running, run, steps=STEPS, groups_per_step=GROUPS, group_size=SAMPLES)
    assert audited(running, run)["whole"]
    return digest


@pytest.fixture(scope="module")
def reference(config: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    with mesh(tmp_path_factory.mktemp("reference")) as running:
        run = running.submit(config)
        done = running.finish(run)
        assert done.weights_digest == check(running, run)
        assert replay(running, run)["same"]
        return done.weights_digest


@pytest.mark.timeout(600)  # with the reference, on a busy machine
def test_kills_of_each_process_change_no_digest(reference: str, config: Path, tmp_path: Path) -> None:
    with mesh(tmp_path) as running:
        run = running.submit(config)
        for kind, step in (("inference", 1), ("learner", 4)):
            workers = {worker.kind: worker for worker in running.until_step(run, step).workers}
            os.kill(workers[kind].pid, signal.SIGKILL)
        running.finish(run)
        assert check(running, run) == reference


def environment_worker(status: run_pb2.RunStatus, number: int) -> run_pb2.Worker:
    return next(worker for worker in status.workers if worker.worker_id == f"environment-{number}")


@pytest.mark.timeout(600)
def test_environment_workers_change_no_digest_also_if_they_are_killed(reference: str, config: Path, tmp_path: Path) -> None:
    with mesh(tmp_path) as running:
        run = running.submit(config, *HOSTED)
        for kind, number, step in (("inference", 0, 1), ("environment", 1, 3), ("environment", 0, 5)):
            workers = {worker.worker_id: worker for worker in running.until_step(run, step).workers}
            assert sorted(name for name in workers if name.startswith("environment")) == [f"environment-{n}" for n in range(3)]
            os.kill(workers[f"{kind}-{number}"].pid, signal.SIGKILL)
        running.finish(run)
        assert check(running, run) == reference
        logs = (Path(running.status(run).run.directory) / "workers").glob("inference-*.log")
        assert any("its open episodes begin again" in log.read_text() for log in logs)
        assert replay(running, run)["same"]


@pytest.mark.timeout(600)
def test_tokens_of_a_language_model_are_trained_and_replayed(tmp_path: Path) -> None:
    config = write_job(tmp_path / "tokens", steps=2, tokens=True)
    with mesh(tmp_path) as running:
        run = running.submit(config, *HOSTED)
        done = running.finish(run)
        digest = assert_consumed_once(running, run, steps=2, groups_per_step=GROUPS, group_size=SAMPLES)
        assert done.weights_digest == digest and audited(running, run)["whole"]
        assert replay(running, run)["same"]


def evaluations(running: Mesh, run: str) -> dict[int, dict[str, float]]:
    wanted = storage_pb2.EventFilter(run_id=run, kinds=["eval.finished"])
    found = running.events.ListEvents(storage_pb2.ListEventsRequest(filter=wanted, page_size=100)).events
    return {event.step: dict(event.metrics) for event in found}


@pytest.mark.timeout(600)
def test_evaluations_change_no_digest_and_agree_between_kinds_of_workers(reference: str, config: Path, tmp_path: Path) -> None:
    """By a reserved worker next to the training, and by a worker between two steps. A gate reads
    them."""
    gate = ("gates.learned={when='eval/return > 0', action='promote'}",)
    with mesh(tmp_path) as running:
        found = []
        for settings in ((*HOSTED, "engine.workers=3", "eval.workers=1"), gate):
            run = running.submit(config, "eval.every_steps=4", *settings)
            running.finish(run)
            assert check(running, run) == reference
            found.append(evaluations(running, run))
        assert found[0] == found[1] and found[0].keys() == {0, 4, 8}
        assert any("eval/return_low" in means for means in found[0].values())
        for means in found[0].values():
            low, high = means.get("eval/return_low", 0.0), means.get("eval/return_high", 60.0)  # absent if all are equal
            assert low <= means["eval/return"] <= high
            assert (means["eval/episodes"], means["eval/failed"], means["eval/steps"]) == (6, 0, means["eval/return"])
        wanted = storage_pb2.EventFilter(run_id=run, kinds=["gate.fired"])
        fired = running.events.ListEvents(storage_pb2.ListEventsRequest(filter=wanted, page_size=10)).events
        assert [event.step for event in fired] == [4]


def stopped(root: dict) -> bool:
    return root["reason"] == "WORKER_STOPPED" and "environment-2" in root["evidence"]


@pytest.mark.timeout(600)
def test_a_stopped_environment_worker_is_named(config: Path, tmp_path: Path) -> None:
    with mesh(tmp_path) as running:
        run = running.submit(config, *HOSTED)
        worker = environment_worker(running.until_step(run, 1), 2)
        assert worker.healthy
        os.kill(worker.pid, signal.SIGSTOP)
        try:
            until(lambda: stopped(explained(running, run)["chain"][-1]), "the stopped worker to be the root cause", 25)
        finally:
            os.kill(worker.pid, signal.SIGCONT)
        running.finish(run)
        check(running, run)


def test_another_seed_gives_another_digest(reference: str, config: Path, tmp_path: Path) -> None:
    with mesh(tmp_path) as running:
        run = running.submit(config, "seed=5", "train.steps=2")
        running.finish(run)
        groups, records, _ = running.ledger(run)
        assert len(records) == 2 and len(groups) == 2 * GROUPS and records[-1].weights_digest != reference
