"""Checks that the source of a reward is the one in the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ClassVar

from blake3 import blake3

from rollout.plan.v1.plan_pb2 import INPUT_ROLE_REWARD, Input
from rollout.plugin import RewardError


class RewardChanged(RewardError):
    """A source file of the reward differs from the plan, so its scores would not be comparable with
    the earlier ones of the run."""

    reason: ClassVar[str] = "REWARD_CHANGED"
    permanent: ClassVar[bool] = True


class Pinned:
    """The reward's files as the plan has them."""

    def __init__(self, inputs: Iterable[Input], base_dir: str, on_change: Callable[[str], None]) -> None:
        """inputs: of the plan. base_dir: folder of relative paths. on_change: called with the error
        if a file has changed while the worker runs."""
        self._files = [(each.path, Path(base_dir, each.path), each.digest) for each in inputs if each.role == INPUT_ROLE_REWARD]
        self.on_change = on_change

    def verify(self) -> None:
        """Raise :class:`RewardChanged` if a file differs from the plan."""
        for name, path, expected in self._files:
            if (found := _digest(path)) != expected:
                raise RewardChanged(
                    f"{name} has changed since the run was planned: its digest is {found}, the plan has {expected}",
                    fix="restore the file and resume the run, or start a new run with the changed reward",
                )


def _digest(path: Path) -> str:
    try:
        return f"blake3-{blake3(path.read_bytes()).hexdigest()}"
    except OSError as error:
        return f"unknown ({error.strerror})"
