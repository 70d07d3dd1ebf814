"""Saved episodes of groups that another worker had begun."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from rollout.environment import Task
from rollout.run.v1.run_pb2 import PromptGroup
from rollout.snapshot.v1 import snapshot_pb2 as pb
from rollout.trajectory.v1.trajectory_pb2 import Trajectory, TrajectoryKey, Turn
from rollout_workers.inference import checkpoints
from rollout_workers.inference.checkpoints import Checkpoints


def _saved(sample: int, texts: list[str]) -> pb.Episode:
    """An episode after one turn of two tokens, and an observation of one."""
    turns = [Turn(end=2), Turn(start=2, end=4, sampled=True, reward=0.5), Turn(start=4, end=5)]
    trajectory = Trajectory(
        turns=turns, token_ids=np.arange(5, dtype="<i4").tobytes(), logprobs=np.zeros(5, "<f4").tobytes(), prompt="p"
    )
    key = TrajectoryKey(run_id="run-a", epoch=0, index=7, sample=sample)
    return pb.Episode(key=key, turns=1, trajectory=trajectory, texts=texts, environment_state=b"{}")


async def test_an_episode_that_cannot_be_read_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def call(services: Any, service: str, make: Any, method: str, request: Any, **options: Any) -> Any:
        return pb.ListEpisodesResponse(episodes=[_saved(0, ["said", "next"]), _saved(1, ["of another version"])])

    monkeypatch.setattr(checkpoints, "call", call)
    who = cast(Any, SimpleNamespace(run="run-a", worker="inference-0"))
    items = cast(Any, [SimpleNamespace(key="0/7", group=PromptGroup(epoch=0, index=7))])
    kept = await Checkpoints(who, cast(Any, None), cast(Any, None)).begin(items, [Task("0/7", b"{}", (0, 1), (1, 2), 0)])
    assert [each.episode.sample for each in kept] == [0]
    assert kept[0].episode.texts == ["said", "next"]
