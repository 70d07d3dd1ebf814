"""Plugins of installed packages, by the group ``rollout.plugins`` of their entry points.

A package names each as ``KIND.NAME``, and a configuration names it as ``DISTRIBUTION:NAME``::

    [project.entry-points."rollout.plugins"]
    "reward.word_count" = "acme_rewards:word_count"

Nothing is imported to list them. A plan pins the files of the package (``package``).
"""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path
from typing import Any, ClassVar, cast

from rollout.errors import RolloutError
from rollout.plugin.place import one_line

GROUP = "rollout.plugins"
KINDS = ("reward", "environment", "tool", "evaluation", "data_source", "advantage", "loss")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
_DISTRIBUTION = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_OWN = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"}
"""Files that an installer writes, which differ between hosts."""


class PluginNotInstalled(RolloutError):
    """No installed package has the plugin."""

    reason: ClassVar[str] = "PLUGIN_NOT_INSTALLED"


class EntryPointInvalid(RolloutError):
    """An entry point that can't be used: its name, or what importing it raises."""

    reason: ClassVar[str] = "PLUGIN_ENTRY_POINT"


class PluginChanged(RolloutError):
    """The installed package of a plugin differs from the plan."""

    reason: ClassVar[str] = "PLUGIN_CHANGED"
    permanent: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Installed:
    """A plugin of an installed package. problem: why it can't be used; empty if it can."""

    kind: str
    name: str
    distribution: str
    version: str
    target: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Package:
    """An installed package, as a plan pins it. digest: ``sha256-<hex>`` over name, version, and the
    path and content of each file."""

    name: str
    version: str
    digest: str


def is_installed(plugin: str) -> bool:
    """Whether a plugin is named by its package, ``DISTRIBUTION:NAME``, not by a file."""
    before, colon, name = plugin.rpartition(":")
    named = bool(colon) and not before.endswith((".py", ".toml"))
    return named and _DISTRIBUTION.fullmatch(before) is not None and _NAME.fullmatch(name) is not None


def installed() -> list[Installed]:
    """The plugins of all installed packages, by package, kind, and name."""
    found = {one for dist in importlib.metadata.distributions() for one in _of(dist)}
    return sorted(found, key=lambda one: (one.distribution, one.kind, one.name))


def load_installed(plugin: str, kind: str) -> Any:
    """The object of ``DISTRIBUTION:NAME``. Raises :class:`PluginNotInstalled`,
    :class:`EntryPointInvalid`."""
    name = plugin.rpartition(":")[2]
    entry = _entry(plugin, kind)
    try:
        return entry.load()
    except Exception as error:
        raise EntryPointInvalid(
            f"importing `{entry.value}` of {plugin} raises {one_line(error)}",
            fix=f"correct the entry point `{kind}.{name}` of the package, or install what it needs",
        ) from error


def has(plugin: str, kind: str) -> bool:
    """Whether an installed package has ``DISTRIBUTION:NAME`` as a plugin of this kind."""
    before, _, name = plugin.rpartition(":")
    return any((one.distribution, one.kind, one.name) == (normal(before), kind, name) for one in installed())


def package(plugin: str, kind: str) -> Package:
    """The package of ``DISTRIBUTION:NAME`` as it is installed now. Raises
    :class:`PluginNotInstalled`."""
    _entry(plugin, kind)
    return package_of(plugin.rpartition(":")[0])


def package_of(name: str) -> Package:
    """An installed distribution as it is now. Raises :class:`PluginNotInstalled`."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise _missing(name) from None
    return Package(normal(found.name), found.version, _digest(found))


def compare(pinned: Iterable[Any]) -> None:
    """Compare the installed packages with those of a plan (``rollout.plan.v1.PluginPackage``).
    Raises :class:`PluginChanged`."""
    for want in pinned:
        try:
            have = package_of(want.name)
        except PluginNotInstalled:
            raise PluginChanged(
                f"the plan has plugins of {want.name} {want.version}, which is not installed",
                fix=f"install {want.name}=={want.version} in the Python of the workers, and resume the run",
            ) from None
        if have.version != want.version:
            raise PluginChanged(
                f"the plan has plugins of {want.name} {want.version}, but {have.version} is installed",
                fix=f"install {want.name}=={want.version} and resume the run, or start a new run",
            )
        if have.digest != want.digest:
            raise PluginChanged(
                f"the files of {want.name} {want.version} have changed since the run was planned: "
                f"their digest is {have.digest}, the plan has {want.digest}",
                fix=f"install {want.name}=={want.version} again and resume the run, or start a new run",
            )


def _of(dist: Distribution) -> Iterator[Installed]:
    for entry in dist.entry_points:
        if entry.group != GROUP:
            continue
        kind, dot, name = entry.name.partition(".")
        problem = ""
        if not dot or kind not in KINDS or not _NAME.fullmatch(name):
            problem = f"the entry point `{entry.name}` is not `KIND.NAME` with one of the kinds {', '.join(KINDS)}"
            kind, name = "", entry.name
        elif re.fullmatch(r"[\w.]+:[\w.]+", entry.value) is None:
            problem = f"the entry point `{entry.name}` has {entry.value!r}, not `module:object`"
        yield Installed(kind, name, normal(dist.name), dist.version, entry.value, problem)


def _entry(plugin: str, kind: str) -> EntryPoint:
    before, _, name = plugin.rpartition(":")
    try:
        dist = importlib.metadata.distribution(before)
    except importlib.metadata.PackageNotFoundError:
        raise _missing(before) from None
    has = list(_of(dist))
    for one in has:
        if one.name == name and one.kind == kind:
            if one.problem:
                raise EntryPointInvalid(
                    f"{before} {dist.version}: {one.problem}", fix="correct its pyproject.toml, and install it again"
                )
            return next(entry for entry in dist.entry_points if entry.group == GROUP and entry.name == f"{kind}.{name}")
    if bad := next((one for one in has if one.problem), None):
        raise EntryPointInvalid(f"{before} {dist.version}: {bad.problem}", fix="correct its pyproject.toml, and install it again")
    names = ", ".join(f"{one.kind} `{one.name}`" for one in has) or "no plugins"
    raise PluginNotInstalled(
        f"{before} {dist.version} has no {kind} `{name}`", fix=f"name what it has: {names}; see `rollout plugin list`"
    )


def _missing(name: str) -> PluginNotInstalled:
    known = sorted({one.distribution for one in installed()})
    near = difflib.get_close_matches(normal(name), known, n=1)
    fix = f"did you mean `{near[0]}`?" if near else "run `rollout plugin install PACKAGE`, or name a file: `file.py:NAME`"
    return PluginNotInstalled(f"no package `{name}` is installed in the Python of the workers", fix=fix)


def normal(name: str) -> str:
    """The normalized name of a distribution (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _digest(dist: Distribution) -> str:
    found = sha256(f"{normal(dist.name)}\0{dist.version}\0".encode())
    for name, path in sorted(_files(dist)):
        found.update(f"{name}\0".encode())
        try:
            found.update(sha256(path.read_bytes()).digest())
        except OSError:
            found.update(b"missing")
    return f"sha256-{found.hexdigest()}"


def _files(dist: Distribution) -> Iterator[tuple[str, Path]]:
    """The files of its RECORD; of an editable installation also the sources of its plugins."""
    for file in dist.files or ():
        if file.name not in _OWN and file.suffix != ".pyc" and ".." not in file.parts:
            yield file.as_posix(), Path(str(dist.locate_file(file)))
    if not _editable(dist):
        return
    for top in sorted({entry.value.partition(":")[0].partition(".")[0] for entry in dist.entry_points if entry.group == GROUP}):
        spec = importlib.util.find_spec(top)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for path in Path(folder).rglob("*.py"):
                yield f"{top}/{path.relative_to(folder).as_posix()}", path
        if spec and spec.origin and not spec.submodule_search_locations:
            yield f"{top}.py", Path(spec.origin)


def _editable(dist: Distribution) -> bool:
    try:
        stated: Any = json.loads(dist.read_text("direct_url.json") or "{}")
    except ValueError:
        return False
    return bool(cast("dict[str, Any]", stated.get("dir_info") or {}).get("editable"))
