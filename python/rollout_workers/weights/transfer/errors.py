"""Why a version could not be brought here. The old one goes on working in every case."""

from __future__ import annotations

from typing import ClassVar

from rollout.errors import RolloutError


class VersionNotFound(RolloutError):
    """A version, or a form of it, that this worker does not have."""

    reason: ClassVar[str] = "WEIGHTS_NOT_HELD"


class BaseMissing(RolloutError):
    """A patch upon a version that is not here."""

    reason: ClassVar[str] = "WEIGHTS_BASE_MISSING"


class SourcesLost(RolloutError):
    """Nobody who was to have the weights delivers them. What has come stays, and the next try goes on from there."""

    reason: ClassVar[str] = "WEIGHTS_SOURCES_LOST"


class TransferCorrupt(RolloutError):
    """What came is no file of tensors. It was thrown away."""

    reason: ClassVar[str] = "WEIGHTS_TRANSFER_CORRUPT"
