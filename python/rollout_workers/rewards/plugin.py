"""Rewards that plugins compute.

A reward is user code: it may hang, crash, print, or block the interpreter for seconds. In a child
process it can't disturb sampling, and a call that takes too long is killed. Expressions also run
there, so a slow one delays nothing else. With ``reward.sandbox`` the process of a plugin is in a
box.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from rollout.errors import RolloutError
from rollout.hosting import wire
from rollout.hosting.boxed import BoxedProcess, BoxLimits, check_host
from rollout.hosting.child import ChildProcess
from rollout.hosting.host import Source, request_type
from rollout.hosting.manifest import read_manifest
from rollout.hosting.runner import Runner
from rollout.hosting.scorers import kind_of
from rollout.hosting.supervised import Condition, SupervisedSidecar, unpinned
from rollout.plugin import RewardShapeError, Score
from rollout.plugin.installed import PluginChanged
from rollout.plugin.v1 import plugin_pb2 as pb
from rollout.sandbox import Sandboxes
from rollout_workers.rewards.pinned import Pinned, RewardChanged
from rollout_workers.rewards.rewards import RewardGroup

_PROCESSES = 4


class PluginRewards:
    """A :class:`RewardSource` for one plugin, which runs in this process, in a child process, or in
    a sidecar."""

    def __init__(self, runner: Runner, name: str = "", kind: str = "reward") -> None:
        """name: of the reward, if the runner has several. kind: also ``evaluation``."""
        self._runner, self._name = runner, name
        self._method = "Evaluate" if kind == "evaluation" else "Reward"

    async def start(self) -> None:
        """Start the runner. Raises ``RewardError``."""
        try:
            await self._runner.start()
        except RolloutError as error:
            raise wire.reward_error(error) from error

    async def call(self, groups: Sequence[RewardGroup], timeout: float) -> list[Score]:
        """Call the plugin once for all samples. Raises ``RewardError``."""
        request = request_type(self._method)(
            plugin=self._name,
            groups=[
                pb.RewardGroup(
                    row_json=group.row_json,
                    samples=[
                        pb.RewardSample(prompt=s.prompt, completion=s.completion, token_ids=s.token_ids) for s in group.samples
                    ],
                )
                for group in groups
            ],
        )
        try:
            response = await self._runner.call(self._method, request, timeout)
        except RolloutError as error:
            raise wire.reward_error(error) from error
        scores = wire.scores_from(response.scores)
        samples = sum(len(group.samples) for group in groups)
        if len(scores) != samples or not all(math.isfinite(score.reward) for score in scores):
            raise RewardShapeError(
                f"the reward's process returned {len(scores)} scores for {samples} samples, or one that is not finite"
            )
        return scores

    async def close(self) -> None:
        """Stop the runner."""
        await self._runner.close()


class SidecarReward:
    """A :class:`RewardSource` of a sidecar that this worker starts, or that has an address. Calls
    overlap in it."""

    def __init__(self, plugin: str, base_dir: str, pinned: Pinned | None = None, *, evaluates: bool = False) -> None:
        """plugin: ``plugin.toml:NAME``. pinned: the files that it must have. evaluates: it may be
        an evaluation."""
        self._plugin, self._base_dir, self._pinned = plugin, base_dir, pinned
        self._evaluates, self._kind = evaluates, "reward"
        self._sidecar: SupervisedSidecar | None = None

    @property
    def condition(self) -> Condition | None:
        """What is wrong with the sidecar; None if nothing is."""
        return None if self._sidecar is None else self._sidecar.condition

    async def start(self) -> None:
        """Start the sidecar. Raises ``RewardError``."""
        verify = self._pinned.verify_running if self._pinned is not None else unpinned
        try:
            self._kind = await asyncio.to_thread(kind_of, self._plugin, self._base_dir, evaluates=self._evaluates)
            manifest = await asyncio.to_thread(read_manifest, self._plugin, self._base_dir, kind=self._kind)
            self._sidecar = SupervisedSidecar(manifest, verify=verify)
        except RolloutError as error:
            raise wire.reward_error(error) from error
        await PluginRewards(self._sidecar, manifest.name, self._kind).start()

    async def call(self, groups: Sequence[RewardGroup], timeout: float) -> list[Score]:
        """Call the reward once for all samples. Raises ``RewardError``."""
        assert self._sidecar is not None
        return await PluginRewards(self._sidecar, self._sidecar.name, self._kind).call(groups, timeout)

    async def close(self) -> None:
        """End the sidecar."""
        if self._sidecar is not None:
            await self._sidecar.close()


class RewardPool:
    """A :class:`RewardSource` of up to four child processes. It starts one more when calls
    overlap."""

    def __init__(self, source: Source, pinned: Pinned | None = None, box: BoxLimits | None = None) -> None:
        """pinned: the files that each process must load. box: each process is in a box with these
        limits."""
        self._source, self._pinned, self._box = source, pinned, box
        self._server = Sandboxes() if box is not None else None
        self._idle: list[ChildProcess | BoxedProcess] = []
        self._slots = asyncio.Semaphore(_PROCESSES)

    async def start(self) -> None:
        """Start one process and load the reward. Raises ``RewardError``."""
        if self._box is not None and self._server is not None:
            await asyncio.to_thread(check_host, self._box)
            await self._server.__aenter__()
        self._idle.append(await self._begin())

    async def call(self, groups: Sequence[RewardGroup], timeout: float) -> list[Score]:
        """Call the function once for all samples. Raises ``RewardError``."""
        async with self._slots:
            try:
                process = self._idle.pop() if self._idle else await self._begin()
            except (RewardChanged, PluginChanged) as error:
                if self._pinned is not None:
                    self._pinned.on_change(str(error))
                raise
            try:
                return await PluginRewards(process, kind=self._source.get("kind", "reward")).call(groups, timeout)
            finally:
                if not process.broken:
                    self._idle.append(process)

    async def close(self) -> None:
        """Kill the processes."""
        idle, self._idle = self._idle, []
        for process in idle:
            await process.close()
        if self._server is not None:
            await self._server.__aexit__()

    async def _begin(self) -> ChildProcess | BoxedProcess:
        if self._pinned is not None:
            await asyncio.to_thread(self._pinned.verify)
        process: ChildProcess | BoxedProcess
        if self._box is not None and self._server is not None:
            process = BoxedProcess(self._server, self._source["plugin"], self._source["base_dir"], self._box)
        else:
            process = ChildProcess([self._source])
        await PluginRewards(process).start()
        return process
