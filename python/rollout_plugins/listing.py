"""Which plugins there are: those of rollout, of installed packages, and of the manifests in a
folder."""

from __future__ import annotations

import tomllib
from hashlib import sha256
from pathlib import Path
from typing import Any

from rollout.environments import PLUGINS
from rollout.environments.install import packages
from rollout.errors import RolloutError
from rollout.hosting.manifest import read_manifest
from rollout.plugin.installed import Installed, installed, package_of
from rollout.suites import PACKAGES
from rollout.tools import NAMES

_DEPTH = 3
"""How many folders below the named one are searched for manifests."""


def listed(folder: str) -> dict[str, Any]:
    """The plugins by where they are from: ``builtin``, ``package``, or ``manifest``. Each has kind,
    name, version, and digest; ``use`` is what a configuration writes, and ``problem`` says why it
    can't be used."""
    return {"plugins": [*_builtin(), *_packages(), *_manifests(Path(folder))]}


def _builtin() -> list[dict[str, Any]]:
    environments = [
        _plugin("environment", name, "builtin", use=f'kind = "{name}"') | {"packages": packages(name)} for name in sorted(PLUGINS)
    ]
    suites = [
        _plugin("evaluation", name, "builtin", use=f'kind = "{name}"') | {"packages": packages(name)} for name in sorted(PACKAGES)
    ]
    return [*environments, *suites, *(_plugin("tool", name, "builtin", use=f'tools = ["{name}"]') for name in sorted(NAMES))]


def _packages() -> list[dict[str, Any]]:
    digests: dict[str, str] = {}
    found: list[dict[str, Any]] = []
    for one in installed():
        if one.distribution not in digests:
            digests[one.distribution] = package_of(one.distribution).digest
        found.append(_package(one, digests[one.distribution]))
    return found


def _package(one: Installed, digest: str) -> dict[str, Any]:
    use = f"{one.distribution}:{one.name}"
    return _plugin(one.kind, one.name, "package", one.version, digest, use, one.problem) | {"distribution": one.distribution}


def _manifests(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    paths = (path for depth in range(_DEPTH + 1) for path in folder.glob("*/" * depth + "*.toml"))
    for path in sorted(path for path in paths if not any(part[0] in "._" for part in path.relative_to(folder).parts)):
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if not {"name", "version", "kind"} <= set(values) or not {"command", "address"} & set(values):
            continue  # another file
        shown = path.relative_to(folder)
        use = f"{shown}:{values['name']}"
        name, kind, version = (str(values[key]) for key in ("name", "kind", "version"))
        digest, problem = "", ""
        try:
            manifest = read_manifest(use, folder)
            digest = _digest(manifest.files, path.parent)
        except RolloutError as error:
            problem = str(error)
        found.append(_plugin(kind, name, "manifest", version, digest, use, problem))
    return found


def _digest(files: tuple[Path, ...], folder: Path) -> str:
    found = sha256()
    for path in files:
        name = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)
        found.update(f"{name}\0".encode() + sha256(path.read_bytes()).digest())
    return f"sha256-{found.hexdigest()}"


def _plugin(
    kind: str, name: str, where: str, version: str = "", digest: str = "", use: str = "", problem: str = ""
) -> dict[str, Any]:
    return {"kind": kind, "name": name, "from": where, "version": version, "digest": digest, "use": use, "problem": problem}
