"""A taskset of `verifiers` 0.4 for `verifiers04_client.py`."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf


class CountingTask(vf.Task):
    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.nodes))


class CountingTaskset(vf.Taskset[CountingTask]):
    def load(self) -> Iterable[CountingTask]:
        for number in range(2):
            yield CountingTask(vf.TaskData(prompt=f"count {number}"), self.config.task)


__all__ = ["CountingTaskset"]
