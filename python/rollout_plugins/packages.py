"""Installs a package with plugins next to the workers, for ``rollout plugin install``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollout.environments.install import InstallFailed
from rollout.plugin.installed import Installed, installed, normal, package_of


def install_package(target: str, base_dir: str, *, again: bool = False) -> dict[str, Any]:
    """Install a requirement, a wheel, or a folder with pip into this Python, and describe its
    plugins. No package that is installed changes its version, except those with plugins.

    again: also if this version is installed. Raises ``InstallFailed``.
    """
    if importlib.util.find_spec("pip") is None:
        raise InstallFailed(f"{sys.executable} has no pip", fix=f"install {target} with the tool that made this environment")
    place = Path(base_dir, target)
    wanted = str(place) if place.exists() else target
    with tempfile.TemporaryDirectory() as folder:
        constraints, report = Path(folder, "constraints.txt"), Path(folder, "report.json")
        ours = {one.distribution for one in installed()}
        pins = {normal(dist.name): dist.version for dist in importlib.metadata.distributions() if dist.name}
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in sorted(pins.items()) if name not in ours))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        command += ["--constraint", str(constraints), "--report", str(report)]
        command += ["--force-reinstall", "--no-deps"] if again else []
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
        done = subprocess.run([*command, wanted], env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)
        if done.returncode:
            raise InstallFailed(
                f"can't install {target}: pip ended with code {done.returncode}",
                fix="see the lines above; the versions of the workers' packages stay as they are",
            )
        entries: list[dict[str, Any]] = json.loads(report.read_text())["install"] if report.is_file() else []
    names = {normal(entry["metadata"]["name"]) for entry in entries if entry.get("requested")} or {_named(target)}
    importlib.invalidate_caches()
    found = [one for one in installed() if one.distribution in names]
    if not found:
        raise InstallFailed(
            f"{target} is installed, but it has no plugins: it has no entry points of the group `rollout.plugins`",
            fix='add `[project.entry-points."rollout.plugins"]` to its pyproject.toml, see docs/plugins.md',
        )
    return {"package": asdict(package_of(found[0].distribution)), "plugins": [_entry(one) for one in found]}


def _entry(one: Installed) -> dict[str, Any]:
    use = f"{one.distribution}:{one.name}"
    return {"kind": one.kind, "name": one.name, "from": "package", "version": one.version, "use": use, "problem": one.problem}


def _named(target: str) -> str:
    """The distribution that a wheel or a requirement names."""
    name = Path(target).name
    return normal(name.split("-")[0] if name.endswith(".whl") else re.split(r"[\[<>=!~; @]", name)[0])
