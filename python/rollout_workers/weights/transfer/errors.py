"""Errors of weight transfer. The current version stays in use in each case."""

from __future__ import annotations

from typing import ClassVar

from rollout.errors import RolloutError


class VersionNotFound(RolloutError):
    """The worker does not have the version, or not in this form."""

    reason: ClassVar[str] = "WEIGHTS_NOT_FOUND"


class BaseMissing(RolloutError):
    """The worker does not have the base of a patch."""

    reason: ClassVar[str] = "WEIGHTS_BASE_MISSING"


class SourcesLost(RolloutError):
    """No source delivers the weights. Received bytes are kept, and the next attempt resumes."""

    reason: ClassVar[str] = "WEIGHTS_SOURCES_LOST"


class TransferCorrupt(RolloutError):
    """The received bytes are not a safetensors file. They were removed."""

    reason: ClassVar[str] = "WEIGHTS_TRANSFER_CORRUPT"
