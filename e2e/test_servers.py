"""The scenarios on real servers: PostgreSQL, Consul, a cluster of three NATS nodes, and S3 (`make
check-servers`)."""

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
from acting import HOSTED, write_job
from conftest import GROUPS, SAMPLES
from mesh import Mesh, assert_consumed_once, mesh, until
from planted import Stalled
from production import Production
from scenario import six_steps
from servers import Servers, postgres_binaries
from sim import Job, audited, finish, sim_mesh, stop, submit
from test_snapshots import rollout
from test_takeover import CONFIG, STEPS, events, pids

from rollout.buffer.v1 import buffer_pb2
from rollout.run.v1 import run_pb2
from rollout.snapshot.v1 import snapshot_pb2


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
def test_explain_names_a_stopped_or_read_only_database(tmp_path: Path) -> None:
    """PostgreSQL is killed under a run without a model, and started again. Then it refuses to
    write."""
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
        writes(production, allowed=False)
        root = stalled.root(lambda wait: "default_transaction_read_only" in wait.get("fix", ""), "the read-only database", 60)
        assert root["owner"] == "database" and "refuses to write" in root["evidence"], root
        writes(production, allowed=True)
        stalled.continues()


def registered(production: Production, run: str) -> dict[str, tuple[int, str]]:
    """The environment workers of a run that pass Consul's checks, each with its process, and the
    proof of its address."""
    port = production.servers.direct["consul"]
    url = f"http://{production.servers.host}:{port}/v1/health/service/environment-worker?passing=true"
    with urllib.request.urlopen(url, timeout=10) as response:
        found = [entry["Service"]["Meta"] for entry in json.load(response)]
    return {meta["worker"]: (int(meta["pid"]), meta["proof"]) for meta in found if meta["run"] == run}


@pytest.mark.timeout(900)  # seventeen processes, five of them workers
def test_environment_workers_are_found_in_consul_also_after_a_kill(tmp_path: Path) -> None:
    """With one rolloutd per service. Consul has the processes that the scheduler started, and the
    weights are those of one process without environment workers."""
    config = write_job(tmp_path / "cartpole", steps=8)
    with mesh(tmp_path / "embedded") as running:
        reference = running.finish(running.submit(config)).weights_digest
    with Production(tmp_path / "servers", Mesh(tmp_path / "servers" / "mesh", "replicas")) as production:
        running = production.running
        run = running.submit(config, *HOSTED)
        workers = running.until_step(run, 1).workers
        started = {worker.worker_id: worker.pid for worker in workers if worker.kind == "environment"}
        assert sorted(started) == [f"environment-{number}" for number in range(3)]
        found = registered(production, run)
        assert {name: pid for name, (pid, _) in found.items()} == started
        assert all(proof for _, proof in found.values())
        os.kill(started["environment-1"], signal.SIGKILL)

        def replaced() -> bool:
            now = registered(production, run)
            return now.keys() == started.keys() and now["environment-1"][0] != started["environment-1"]

        until(replaced, "Consul to have the process in its place", 120)
        assert running.finish(run).weights_digest == reference
        assert audited(running, run)["whole"]
        until(lambda: not registered(production, run), "the workers to leave Consul", 60)


def writes(production: Production, *, allowed: bool) -> None:
    """Let new transactions of PostgreSQL write, or refuse it, and end the connections of others."""
    binary, port = str(postgres_binaries() / "psql"), str(production.servers.direct["postgres"])
    statements = [
        "SET default_transaction_read_only = off",
        f"ALTER ROLE rollout SET default_transaction_read_only = {'off' if allowed else 'on'}",
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND usename = 'rollout'",
    ]
    commands = [part for statement in statements for part in ("-c", statement)]
    command = [binary, "-X", "-h", production.servers.host, "-p", port, "-U", "rollout", "postgres", *commands]
    subprocess.run(command, check=True, capture_output=True, timeout=30)


def test_a_lost_host_without_a_database_is_restored_from_the_bucket(tmp_path: Path) -> None:
    """The state folder is deleted while the run trains. A new control plane finds the snapshots in
    the bucket; the inputs are in another folder there."""
    job, here, there = Job(tmp_path / "job", steps=12, snapshot=3), tmp_path / "here", tmp_path / "there"
    servers = Servers(tmp_path / "servers").start_bucket()
    config = tmp_path / "rolloutd.toml"
    config.write_text(servers.bucket(servers.direct["s3"]))
    running = sim_mesh(here, seconds=0.02)
    try:
        running.config = config
        running.start()
        whole = submit(running, running.plan(job.write()), job)
        digest = finish(running, whole)
        run = submit(running, running.plan(job.write()), job)
        running.until_step(run, 7)
        rollout(here, "snapshot", "delete", taken(running, whole)[-1].snapshot_id, "--yes")
        kept = {each.snapshot_id for each in (*taken(running, whole), *taken(running, run))}
        stop(running)
        shutil.rmtree(here)
        moved = job.folder.rename(tmp_path / "moved")

        running = sim_mesh(there, seconds=0.02)
        running.config = config
        running.start()
        assert rollout(there, "snapshot", "list").get("snapshots", []) == []
        found = rollout(there, "snapshot", "recover")["snapshots"]
        assert kept == {each["snapshot"]["snapshot_id"] for each in found}
        assert not any(each.get("known") or each.get("problem") for each in found), found
        found = rollout(there, "snapshot", "recover", run, "--inputs", str(moved))["snapshots"]
        assert all(each["known"] for each in found) and {each["snapshot"]["run_id"] for each in found} == {run}
        newest = max(found, key=lambda each: int(each["snapshot"]["step"]))["snapshot"]
        assert int(newest["step"]) >= 6
        restored = rollout(there, "snapshot", "restore", newest["snapshot_id"], "--detach")["run_id"]
        assert finish(running, restored) == digest
        assert audited(running, restored)["whole"]
        steps = running.buffer.ListSteps(buffer_pb2.ListStepsRequest(run_id=restored)).steps
        assert [step.step for step in steps] == list(range(int(newest["step"]) + 1, job.steps + 1))
    finally:
        stop(running)
        servers.stop()


def taken(running: Mesh, run: str) -> list[snapshot_pb2.Snapshot]:
    """The snapshots of a run, newest first."""
    return list(running.snapshots.ListSnapshots(snapshot_pb2.ListSnapshotsRequest(run_id=run)).snapshots)


@pytest.mark.timeout(600)
def test_a_lost_host_with_a_database_continues_elsewhere(tmp_path: Path) -> None:
    """All services are killed, and their folders and the shared one deleted. Others with the same
    database and bucket continue the run, and restore another one from its snapshots."""
    job = Job(tmp_path / "job", steps=12, snapshot=3)
    with Production(tmp_path / "servers", sim_mesh(tmp_path / "servers" / "here", "replicas", seconds=0.02)) as production:
        running = production.running
        whole = submit(running, running.plan(job.write()), job)
        digest = finish(running, whole)
        run = submit(running, running.plan(job.write()), job)
        running.until_step(run, 7)
        snapshot = next(each for each in taken(running, run) if each.step == 6).snapshot_id
        stop(running)
        shutil.rmtree(running.state)
        shutil.rmtree(tmp_path / "servers" / "shared")

        running.state = tmp_path / "servers" / "there"
        running.start()
        assert finish(running, run) == digest
        assert audited(running, run)["whole"]
        restored = running.snapshots.RestoreSnapshot(snapshot_pb2.RestoreSnapshotRequest(snapshot_id=snapshot)).run.run_id
        assert finish(running, restored) == digest
        assert audited(running, restored)["whole"]
