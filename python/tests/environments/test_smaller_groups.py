"""Failed samples are left out of groups that are large enough without them."""

from __future__ import annotations

import types
import unittest.mock
from typing import Any, cast

import numpy as np
import pytest

from rollout.environment import Observation, Result, Task, failed
from rollout.run.v1.run_pb2 import PromptGroup
from rollout.trajectory.v1.trajectory_pb2 import OUTCOME_COMPLETED, OUTCOME_INFRA_FAILED, TrajectoryEnvelope, TrajectoryHeader
from rollout.weights.v1.weights_pb2 import WeightsReceipt
from rollout_workers.environments.episode import Episode, FinishedGroup
from rollout_workers.inference.encode import encode_group
from rollout_workers.inference.sampler import Outlet


@pytest.mark.parametrize(("min_size", "left_out"), [(0, 0), (4, 0), (3, 1), (2, 1)])
@pytest.mark.parametrize("samples", [(0, 1, 2, 3), (1,)])
def test_a_failed_sample_may_be_left_out_of_a_smaller_group(samples: tuple[int, ...], min_size: int, left_out: int) -> None:
    """Also if the others of the group arrived earlier: the buffer counts the usable ones."""
    task = Task("t", b"{}", samples, (0, 1, 2, 3))
    episodes = [Episode(task, place, Observation(np.array([1], np.int32), "1")) for place in range(len(samples))]
    for episode in episodes:
        episode.result = failed("ENVIRONMENT_TIMEOUT") if episode.sample == 1 else Result(1.0)
    receipts = cast(Any, types.SimpleNamespace(of=lambda version: WeightsReceipt(version=3), digest=lambda version: ""))
    group = PromptGroup(run_id="run", group_size=4)
    envelopes = encode_group(group, FinishedGroup(task, tuple(episodes)), receipts, "w", min_size)
    assert [e.header.left_out for e in envelopes].count(True) == left_out
    assert all(e.header.outcome == OUTCOME_INFRA_FAILED for e in envelopes if e.header.left_out)


async def test_published_samples_are_counted_by_outcome_and_reason() -> None:
    double = unittest.mock.AsyncMock()
    double.most_bytes = 1 << 20
    outlet = Outlet(double, double, unittest.mock.Mock(), double)
    with unittest.mock.patch.object(outlet, "_meters") as meters:
        ends = [(OUTCOME_COMPLETED, ""), (OUTCOME_COMPLETED, ""), (OUTCOME_INFRA_FAILED, "ENVIRONMENT_TIMEOUT")]
        outlet.send([], [TrajectoryEnvelope(header=TrajectoryHeader(outcome=end, reason=reason)) for end, reason in ends])
        await outlet.drain()
    assert [call.args for call in meters.samples.add.call_args_list] == [
        (2, {"outcome": "COMPLETED", "reason": ""}),
        (1, {"outcome": "INFRA_FAILED", "reason": "ENVIRONMENT_TIMEOUT"}),
    ]
