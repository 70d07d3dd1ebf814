"""The same groups give the same bytes on every worker and in every order."""

from __future__ import annotations

import random

from rollout.run.v1.run_pb2 import PromptGroup
from rollout_testing.daemon import Daemon
from rollout_testing.run import Example, RunStreams, by_key, config, prompt_group, spec
from rollout_testing.worker import InProcess

GROUPS = 24


async def payloads(daemon: Daemon, example: Example, run: str, groups: list[PromptGroup], burst: int) -> dict:
    """The trajectories of a separate worker for the groups, which are published ``burst`` at a
    time."""
    streams = await RunStreams.open(daemon, run)
    run_config = config(example, deterministic=True, engine={"slots": 16})
    made = await InProcess(spec(daemon, run_config, run=run)).start()
    envelopes = []
    for start in range(0, GROUPS, burst):
        await streams.issue(groups[start : start + burst])
        envelopes += await streams.collect(4 * len(groups[start : start + burst]))
    await made.stop()
    await streams.close()
    return by_key(envelopes)


async def test_two_workers_with_different_orders_give_equal_bytes(daemon: Daemon, example: Example, run: str) -> None:
    rows = example.rows(GROUPS)
    groups = [prompt_group(i, rows[i], run=run) for i in range(GROUPS)]
    mixed = random.Random(0).sample(groups, GROUPS)
    for group in mixed:
        assert group.seeds == groups[group.index].seeds
    one = await payloads(daemon, example, run, groups, GROUPS)
    other = await payloads(daemon, example, f"{run}-mixed", _renamed(mixed, f"{run}-mixed"), 5)
    assert len(one) == 4 * GROUPS
    assert len(set(one.values())) == 4 * GROUPS
    assert {key: payload.replace(f"{run}-mixed".encode(), b"") for key, payload in other.items()} != {}
    same = {key: _without_run(payload) for key, payload in one.items()}
    assert same == {key: _without_run(payload) for key, payload in other.items()}


def _renamed(groups: list[PromptGroup], run: str) -> list[PromptGroup]:
    """The same work in another run, so that the runs share nothing else."""
    copies = [PromptGroup.FromString(group.SerializeToString()) for group in groups]
    for copy in copies:
        copy.run_id = run
    return copies


def _without_run(payload: bytes) -> bytes:
    from rollout.trajectory.v1.trajectory_pb2 import Trajectory

    trajectory = Trajectory.FromString(payload)
    trajectory.key.run_id = ""
    return trajectory.SerializeToString(deterministic=True)
