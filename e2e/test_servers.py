"""The scenarios on real servers: PostgreSQL, Consul, a cluster of three NATS nodes, and S3 (`make
check-servers`)."""

import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from conftest import GROUPS, SAMPLES
from mesh import Mesh, assert_consumed_once, mesh
from planted import Stalled
from production import Production
from scenario import six_steps
from sim import Job, audited, sim_mesh, submit
from test_takeover import CONFIG, STEPS, events, pids

from rollout.run.v1 import run_pb2


@pytest.mark.timeout(900)  # seventeen processes, two of them with torch
def test_six_steps_give_the_weights_of_one_process(config: Path, tmp_path: Path) -> None:
    with mesh(tmp_path / "embedded") as running:
        reference = six_steps(running, config)
    with Production(tmp_path / "servers", Mesh(tmp_path / "servers" / "mesh", "replicas")) as production:
        assert six_steps(production.running, config) == reference
        [run] = production.running.scheduler.ListRuns(run_pb2.ListRunsRequest()).runs
        assert audited(production.running, run.run_id)["whole"]
        stored = tmp_path / "servers" / "servers" / "s3" / "rollout" / "mesh"
        assert list(stored.glob("cas/*/*")), "no artifact is in the bucket"
        assert list(stored.glob("segments/*/*")), "no payload is in the bucket"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_torch_run_continues_under_the_next_leader(config: Path, tmp_path: Path) -> None:
    """Kills the leading scheduler twice, and asks it to stop once. The workers stay, no step is
    made twice, and the weights are those of an undisturbed run."""
    with mesh(tmp_path / "embedded") as running:
        run = running.submit(config, *CONFIG)
        running.finish(run)
        reference = assert_consumed_once(running, run, steps=STEPS, groups_per_step=GROUPS, group_size=SAMPLES)
    with Production(tmp_path / "servers", Mesh(tmp_path / "servers" / "mesh", "replicas")) as production:
        running = production.running
        run = running.submit(config, *CONFIG)
        before = pids(running.until_step(run, 2))
        for number in (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM):
            _, name = running.leader("scheduler")
            step, began = running.status(run).run.step, time.monotonic()
            running.processes[name].send_signal(number)
            running.processes[name].wait(60)
            for ahead in (1, 2, 3):
                after = running.until_step(run, step + ahead)
                print(f"{number.name}: step {ahead} after {time.monotonic() - began:.2f} s")
            assert pids(after) == before
            running.start_service(name)
        last = running.finish(run)
        digest = assert_consumed_once(running, run, steps=STEPS, groups_per_step=GROUPS, group_size=SAMPLES)
        assert (digest, last.incarnation) == (reference, 1)
        made = Counter(event.step for event in events(running, run, "step.committed"))
        assert made == Counter(range(1, STEPS + 1)), "a step was made twice"
        assert len(events(running, run, "worker.started")) == len(before)
        assert len(events(running, run, "worker.adopted")) == 3 * len(before)
        assert audited(running, run)["whole"]


@pytest.mark.timeout(600)
def test_explain_names_a_stopped_database(tmp_path: Path) -> None:
    """PostgreSQL is killed under a run without a model, and started again."""
    job = Job(tmp_path / "job", steps=100_000, workers=1, snapshot=1000)
    with Production(tmp_path / "servers", sim_mesh(tmp_path / "servers" / "mesh", "replicas", seconds=0.05)) as production:
        running = production.running
        run = submit(running, running.plan(job.write()), job)
        running.until_step(run, 1)
        stalled, database = Stalled(running, run, job.folder), production.servers.by_name["postgres"]
        database.kill()
        root = stalled.root(lambda wait: wait["owner"] == "database", "the database", 60)
        assert root["reason"] == "NO_ANSWER" and "PostgreSQL" in root["fix"], root
        database.launch()
        database.wait()
        stalled.continues()
