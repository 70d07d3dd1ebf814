"""Describes what a worker does for each group that it has, when someone asks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from rollout.wait.v1.wait_pb2 import Activity
from rollout_workers.environments.limits import Limits
from rollout_workers.inference.puller import Puller
from rollout_workers.inference.sampler import RowSender, Sampler
from rollout_workers.worker.calls import Calls

_MOST_POSITIONS = 32


class Doing(NamedTuple):
    """What happens to one group. since: seconds since 1970. limit: in seconds; 0: none."""

    doing: str
    name: str
    since: float
    limit: float


@dataclass(frozen=True, slots=True)
class InFlight:
    """Reads the parts of a worker. They keep no record for this: nothing is computed until
    ``activities`` is called."""

    puller: Puller
    consumer: Sampler | RowSender
    calls: Calls
    limits: Limits

    def activities(self) -> list[Activity]:
        """What is done now, the longest first. Groups for which the same is done are one
        activity."""
        now, monotonic = time.time(), time.monotonic()
        found: dict[int, Doing] = {}
        held, active = self.puller.waiting_items(), self.puller.active_items()
        for item, outdated in held:
            found[item.group.position] = Doing("WEIGHTS" if outdated else "SLOT", "", now - (monotonic - item.arrived), 0.0)
        episodes = self.consumer.doing()
        unsent = self.consumer.unsent()
        for item in active:
            arrived = now - (monotonic - item.arrived)
            if item.key in unsent:
                found[item.group.position] = Doing("PUBLISH", "", unsent[item.key], 0.0)
            elif item.key in episodes:
                found[item.group.position] = self._of_episode(episodes[item.key], item.group.row_json)
            else:
                found[item.group.position] = Doing("PREPARE", "", arrived, 0.0)
        return _joined(found)

    def _of_episode(self, episode: tuple[str, float], row: bytes) -> Doing:
        doing, since = episode
        if doing != "ENVIRONMENT":
            return Doing(doing, "", since, 0.0)
        if call := self.calls.of(row):
            return Doing(call.doing, call.name, call.since, call.limit)
        limit = self.limits.turn_seconds
        return Doing(doing, self.limits.name if self.limits.turns else "", since, 0.0 if math.isinf(limit) else limit)


def _joined(found: dict[int, Doing]) -> list[Activity]:
    same: dict[tuple[str, str, float], list[int]] = {}
    for position, doing in found.items():
        same.setdefault((doing.doing, doing.name, doing.limit), []).append(position)
    joined = [_activity(found, positions) for positions in same.values()]
    return sorted(joined, key=lambda activity: (activity.since.seconds, activity.since.nanos))


def _activity(found: dict[int, Doing], positions: Iterable[int]) -> Activity:
    positions = sorted(positions)
    oldest = min((found[position] for position in positions), key=lambda doing: doing.since)
    activity = Activity(
        doing=oldest.doing,
        name=oldest.name,
        limit_seconds=oldest.limit,
        positions=positions[:_MOST_POSITIONS],
        groups=len(positions),
    )
    activity.since.FromMilliseconds(int(oldest.since * 1000))
    return activity
