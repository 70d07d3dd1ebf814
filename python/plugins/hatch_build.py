"""The hook of the build: the dependency on ``rollout-rl`` of the same version."""

from __future__ import annotations

from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Dependencies(MetadataHookInterface):
    """Adds ``rollout-rl`` of the same version to the dependencies."""

    def update(self, metadata: dict[str, Any]) -> None:
        metadata["dependencies"] = [f"rollout-rl=={metadata['version']}", *self.config["dependencies"]]
