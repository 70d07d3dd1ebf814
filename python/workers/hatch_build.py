"""The hooks of the build: the dependencies on ``rollout-rl`` and ``rollout-plugins``, and the CPU
kernels.

The kernels are compiled if there is a C compiler. Without one the wheel is pure Python, and the
workers use torch and numpy.
"""

from __future__ import annotations

import os
import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

FOLDER = "rollout_workers/kernels"


class Dependencies(MetadataHookInterface):
    """Adds ``rollout-rl`` and ``rollout-plugins`` of the same version to the dependencies."""

    def update(self, metadata: dict[str, Any]) -> None:
        metadata["dependencies"] = [
            *(f"{name}=={metadata['version']}" for name in ("rollout-rl", "rollout-plugins")),
            *self.config["dependencies"],
        ]


class KernelHook(BuildHookInterface[Any]):
    """Compiles the kernels next to their sources and adds them to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, then add the libraries and the platform to ``build_data``. Never fails because
        of a kernel."""
        script = Path(self.root, FOLDER, "build.py")
        if not script.is_file():
            return  # an image installs the dependencies before it copies the sources
        libraries, warning = runpy.run_path(str(script))["compile_kernels"]()
        if warning:
            self.app.display_warning(warning)
        if libraries and version != "editable":
            platform = sysconfig.get_platform().replace("universal2", os.uname().machine).replace("-", "_").replace(".", "_")
            build_data.update(pure_python=False, tag=f"py3-none-{platform}")
            build_data["force_include"].update({str(path): f"{FOLDER}/{path.name}" for path in libraries})
