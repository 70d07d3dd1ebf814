"""Items whose samples can't be encoded go back to the queue."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from rollout.environment import Observation, Result, Task
from rollout.run.v1.run_pb2 import PromptGroup
from rollout.trajectory.v1.trajectory_pb2 import TrajectoryEnvelope
from rollout_workers.environments.episode import Episode, FinishedGroup
from rollout_workers.inference.receipt import EngineReceipts
from rollout_workers.inference.sampler import Outlet, Sampler
from rollout_workers.worker.stream import WorkItem

FIRST = Observation(np.array([1, 2], np.int32), "1+1=")


class Runner:
    """Ends every task at once, with a reward for more tokens than the completion has."""

    async def run(self, tasks: Sequence[Task]) -> AsyncGenerator[list[FinishedGroup], None]:
        wrong = Result(token_rewards=(1.0, 1.0))
        yield [FinishedGroup(task, (Episode(task, 0, FIRST, result=wrong),)) for task in tasks]


class Queue:
    """Records the items that are returned."""

    def __init__(self) -> None:
        self.returned: list[WorkItem] = []

    async def drop(self, items: Sequence[WorkItem]) -> None:
        self.returned.extend(items)

    def send(self, items: Sequence[WorkItem], envelopes: Sequence[TrajectoryEnvelope]) -> None: ...

    async def drain(self) -> None: ...


async def test_items_whose_samples_cannot_be_encoded_are_returned() -> None:
    queue = Queue()
    who, engine, runner, outlet, puller = cast(Any, (SimpleNamespace(worker="w", run="r"), None, Runner(), queue, queue))
    made = Sampler(who, runner, EngineReceipts(engine), outlet, cast(Any, None), puller)
    items = [WorkItem(PromptGroup(run_id="r", index=index, group_size=1, seeds=[1]), "", 1) for index in range(2)]
    made.begin(items)
    await made.drain()
    assert queue.returned == items


class Full:
    """A stream that accepts nothing."""

    most_bytes = 1 << 20

    async def publish(self, data: bytes, headers: dict[str, str]) -> None:
        raise OSError("no space")


class Saves:
    """Records the items whose episodes are not expected any more."""

    def __init__(self) -> None:
        self.forgotten: list[WorkItem] = []

    def forget(self, items: Sequence[WorkItem]) -> None:
        self.forgotten.extend(items)


async def test_the_episodes_of_items_that_cannot_be_published_are_forgotten() -> None:
    queue, saves = Queue(), Saves()
    outlet = Outlet(*cast(Any, (Full(), None, None, queue, saves)))
    items = [WorkItem(PromptGroup(run_id="r", group_size=1, seeds=[1]), "", 1)]
    outlet.send(items, [TrajectoryEnvelope()])
    await outlet.drain()
    assert queue.returned == items and saves.forgotten == items
