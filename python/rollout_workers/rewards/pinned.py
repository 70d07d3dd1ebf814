"""Checks that the source of a reward or an environment is the one in the plan."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ClassVar

from blake3 import blake3

from rollout.errors import RolloutError
from rollout.plan.v1.plan_pb2 import INPUT_ROLE_ENVIRONMENT, INPUT_ROLE_REWARD, Input, PluginPackage
from rollout.plugin import RewardError
from rollout.plugin.installed import compare


class RewardChanged(RewardError):
    """A source file of the reward differs from the plan, so its scores would not be comparable with
    the earlier ones of the run."""

    reason: ClassVar[str] = "REWARD_CHANGED"
    permanent: ClassVar[bool] = True


class EnvironmentChanged(RolloutError):
    """A source file of the environment differs from the plan."""

    reason: ClassVar[str] = "ENVIRONMENT_CHANGED"
    permanent: ClassVar[bool] = True


class Pinned:
    """The files of the reward, or of the environment, as the plan has them."""

    def __init__(
        self,
        inputs: Iterable[Input],
        base_dir: str,
        on_change: Callable[[str], None],
        *,
        environment: bool = False,
        plugins: Iterable[PluginPackage] = (),
    ) -> None:
        """inputs: of the plan. base_dir: folder of relative paths. on_change: called with the error
        if a file has changed while the worker runs. plugins: the packages of the plan."""
        role = INPUT_ROLE_ENVIRONMENT if environment else INPUT_ROLE_REWARD
        self._error = EnvironmentChanged if environment else RewardChanged
        self._what = "environment" if environment else "reward"
        self._files = [(each.path, Path(base_dir, each.path), each.digest) for each in inputs if each.role == role]
        kinds = {"environment", "tool"} if environment else {"reward"}
        self._packages = [each for each in plugins if kinds & set(each.kinds)]
        self.on_change = on_change

    def verify(self) -> None:
        """Raise :class:`RewardChanged` or :class:`EnvironmentChanged` if a file differs from the
        plan, and ``PluginChanged`` if a package does. Blocks: it reads all of them."""
        compare(self._packages)
        for name, path, expected in self._files:
            if (found := _digest(path)) != expected:
                raise self._error(
                    f"{name} has changed since the run was planned: its digest is {found}, the plan has {expected}",
                    fix=f"restore the file and resume the run, or start a new run with the changed {self._what}",
                )

    async def verify_running(self) -> None:
        """``verify`` in a thread; reports a change with ``on_change`` too."""
        try:
            await asyncio.to_thread(self.verify)
        except RolloutError as error:
            self.on_change(str(error))
            raise


def _digest(path: Path) -> str:
    try:
        return f"blake3-{blake3(path.read_bytes()).hexdigest()}"
    except OSError as error:
        return f"unknown ({error.strerror})"
