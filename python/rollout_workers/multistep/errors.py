"""What a multi-step rollout worker refuses."""

from __future__ import annotations

from typing import ClassVar

from rollout.errors import RolloutError


class SettingsInvalid(RolloutError, ValueError):
    """A key of the worker's config, or a variable of its process, is missing or wrong."""

    reason: ClassVar[str] = "MULTISTEP_SETTINGS_INVALID"
    permanent: ClassVar[bool] = True


class BatchInvalid(RolloutError, ValueError):
    """A batch of an environment rank, or of the policy, can't be used. Nothing of it was used."""

    reason: ClassVar[str] = "MULTISTEP_BATCH_INVALID"


class EnvironmentSilent(RolloutError, TimeoutError):
    """An environment rank sent nothing for longer than the limit."""

    reason: ClassVar[str] = "MULTISTEP_ENVIRONMENT_SILENT"


class WeightsMismatch(RolloutError, ValueError):
    """The actor's weights don't fit the policy. The policy keeps the weights that it had."""

    reason: ClassVar[str] = "MULTISTEP_WEIGHTS_MISMATCH"
