"""Three hosts: one for services and servers, one for the learner, one for two inference workers.
Each is disconnected and connected again, one after the other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hosts import Hosts, reason
from mesh import until
from production import PACE
from servers import Servers, free_ports
from sim import Job, audited, finish, journals_agree, sim_mesh, stop, submit

from rollout.run.v1 import run_pb2

_WORKER = """#!/bin/sh
# Starts a worker on its host: the learner on one, the others on another.
case "$1" in
learner) namespace={learner} address={learner_address} ;;
*) namespace={inference} address={inference_address} ;;
esac
export ROLLOUT_WORKER_HOST=$address ROLLOUT_WORKER_INSECURE_LISTEN=true
exec ip netns exec "$namespace" {python} -m rollout_testing.sim "$@"
"""


@pytest.fixture
def hosts():
    if why := reason():
        print(f"\nskipped: {why}", file=sys.__stdout__)
        pytest.skip(why)
    with Hosts("control", "learner", "inference") as made:
        yield made


@pytest.mark.timeout(600)
def test_a_run_survives_the_disconnect_of_each_host(hosts: Hosts, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", steps=40)
    alone = sim_mesh(tmp_path / "alone", seconds=PACE)
    servers = Servers(tmp_path / "servers", hosts.address["control"], hosts.namespace["control"])
    running = sim_mesh(tmp_path / "mesh", "replicas", seconds=PACE)
    try:
        lock = alone.start().plan(job.write())
        undisturbed = finish(alone, submit(alone, lock, job))
        alone.stop()
        (job.folder / "tried").unlink()

        servers.start()
        start(running, servers, hosts, tmp_path)
        run = submit(running, lock, job)
        workers = {worker.kind: worker.address for worker in running.until_step(run, 3).workers}
        assert workers["learner"].startswith(hosts.address["learner"] + ":")
        assert workers["inference"].startswith(hosts.address["inference"] + ":")
        for name, step in (("inference", 8), ("learner", 16)):
            running.until_step(run, step)
            hosts.cut(name)
            unreachable(running, run, name)
            hosts.connect(name)
        assert finish(running, run) == undisturbed
        assert audited(running, run)["whole"]
        assert journals_agree(running, run, job)["steps"] == job.steps
    finally:
        stop(alone)
        stop(running)
        servers.stop()


def start(running, servers: Servers, hosts: Hosts, folder: Path) -> None:
    """Every service on its host."""
    worker, ports = folder / "worker", free_ports()
    running.config = folder / "rolloutd.toml"
    running.config.write_text(servers.configuration(servers.direct.__getitem__, folder / "shared"))
    worker.write_text(
        _WORKER.format(
            learner=hosts.namespace["learner"],
            inference=hosts.namespace["inference"],
            learner_address=hosts.address["learner"],
            inference_address=hosts.address["inference"],
            python=sys.executable,
        )
    )
    worker.chmod(0o755)
    running.namespace = hosts.namespace["control"]
    running.arguments += ("--worker-command", str(worker), "--insecure-listen")
    for name in running.members():
        running.own_arguments[name] = ("--listen", f"{hosts.address['control']}:{next(ports)}")
    running.start()


def unreachable(running, run: str, kind: str) -> None:
    """Wait until none of the host's workers is registered."""

    def away() -> bool:
        status = running.scheduler.GetRun(run_pb2.GetRunRequest(run_id=run), timeout=10).status
        return all(not worker.address for worker in status.workers if worker.kind == kind)

    until(away, f"the workers of the {kind} host to be deregistered", 60)
