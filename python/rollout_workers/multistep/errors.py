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


class ChannelFull(RolloutError):
    """The receiver of a key has not taken enough of its items."""

    reason: ClassVar[str] = "CHANNEL_FULL"

    def __init__(self, key: str, capacity: int) -> None:
        super().__init__(f"{capacity} items of the key {key!r} were not taken", fix="await room(key) before put")


class ChannelClosed(RolloutError):
    """A channel was closed on this side, or the sender of a key has closed it."""

    reason: ClassVar[str] = "CHANNEL_CLOSED"

    def __init__(self, key: str) -> None:
        super().__init__(f"the channel of the key {key!r} is closed")


class PeerLost(RolloutError):
    """The other side of a channel has shown no life for longer than the limit."""

    reason: ClassVar[str] = "CHANNEL_PEER_LOST"


class KeyInvalid(RolloutError, ValueError):
    """The key of a channel can't be part of a subject."""

    reason: ClassVar[str] = "CHANNEL_KEY_INVALID"
    permanent: ClassVar[bool] = True
