"""The environment of runs whose episodes an agent outside of the run plays through the gateway."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.environment import Observation, Refusal, Result, Task, Turn
from rollout_workers.environments.registry import Context

_REFUSAL = Refusal("ENVIRONMENT_EXTERNAL", "an agent takes the prompts of this run from the gateway; workers play no episodes")


def build(context: Context) -> External:
    """Build the environment for the registry."""
    return External()


class External:
    """Refuses every task. No worker of such a run pulls tasks."""

    async def reset(self, tasks: Sequence[Task]) -> list[Observation | Refusal]:
        """A refusal for each task."""
        return [_REFUSAL] * len(tasks)

    async def step(self, turns: Sequence[Turn]) -> list[Observation | Result]:
        """Never called, because no episode begins."""
        raise NotImplementedError(_REFUSAL.message)

    async def close(self, episodes: Sequence[tuple[str, int]]) -> None:
        """Do nothing, because no episode begins."""
