"""A group can be followed through all components: the services, NATS, and the Python workers export
their spans to a collector. Calls of tools are in test_many_turns_torch.py."""

from __future__ import annotations

from pathlib import Path

from collector import collecting
from sim import Job, finish, sim_mesh, stop, submit

METERS = ("rpc.server.call.duration", "rollout.samples", "rollout.train.duration")


def test_a_group_is_traced_from_its_issue_to_the_delivery_of_its_weights(tmp_path: Path) -> None:
    with collecting() as (collected, environment):
        running = sim_mesh(tmp_path / "state", "seven")
        running.environment |= environment
        running.start()
        try:
            job = Job(tmp_path / "job", steps=3)
            finish(running, submit(running, running.plan(job.write()), job))
            collected.has(meters=METERS)
        finally:
            stop(running)
