"""Makes the interpreter of an environment, or of a suite, from its hashed lock, for
``rollout plugin install``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import ClassVar

from rollout.environments import FOLDER, PLUGINS
from rollout.errors import RolloutError
from rollout.suites import PACKAGES

KINDS = frozenset(PLUGINS) | frozenset(PACKAGES)
"""What can be installed: kinds of environments and of suites."""
_OURS = Path(FOLDER).parents[1]
"""The folder with the packages ``rollout`` and ``buf``."""


class PluginUnknown(RolloutError):
    """There is no environment and no suite of this name."""

    reason: ClassVar[str] = "PLUGIN_UNKNOWN"


class InstallFailed(RolloutError):
    """A program that makes the interpreter failed."""

    reason: ClassVar[str] = "PLUGIN_INSTALL"


def install(name: str, folder: str | os.PathLike[str], *, again: bool = False) -> Path:
    """Make the interpreter of an environment or suite in ``folder``, and return its path. One that
    is up to date is kept, unless ``again`` is set; another one that this function made is replaced.

    Raises ``PluginUnknown``, ``InstallFailed``, also if the folder has other files.
    """
    if name not in KINDS:
        raise PluginUnknown(f"there is no environment `{name}` to install", fix=f"name one of: {', '.join(sorted(KINDS))}")
    lock = _lock(name)
    target = Path(os.path.abspath(folder))
    made, stamp = target / "bin" / "python", target / "rollout.plugin"  # empty until the installation is complete
    state = f"{sha256(lock.read_bytes()).hexdigest()} {sys.version_info[:2]} {_OURS} {_version()}\n"
    if not again and made.exists() and stamp.exists() and stamp.read_text() == state:
        return made
    if target.exists() and not stamp.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InstallFailed(f"{target} has other files, which would be lost", fix="name an empty or a new folder with --folder")
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    stamp.write_text("")
    _run(["-m", "venv", str(target)], sys.executable, "make a virtual environment", "install Python's venv module")
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes", "-r", str(lock)]
    _run(pip, str(made), f"install {lock.name}", "see the lines above; the packages come from pip's index")
    site = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(target), "platbase": str(target)}))
    if (_OURS / "pyproject.toml").exists():  # a checkout
        (site / "rollout.pth").write_text(f"{_OURS}\n")
    else:
        for package in ("rollout", "buf"):
            shutil.copytree(_OURS / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    stamp.write_text(state)
    return made


def packages(name: str) -> dict[str, str]:
    """The version of the package that the environment of a kind is made for."""
    wanted = name.replace("_", "-")
    lines = _lock(name).read_text().splitlines()
    pinned = dict(line.removesuffix(" \\").split(" ;")[0].split("==") for line in lines if "==" in line and line[0].isalpha())
    return {wanted: pinned[wanted]}


def _lock(name: str) -> Path:
    return Path(FOLDER) / "locks" / f"{name}.lock"


def _run(arguments: list[str], python: str, what: str, fix: str) -> None:
    # Not the environment of this process: its PYTHONPATH may have packages of other versions.
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run([python, *arguments], env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)
    if done.returncode:
        raise InstallFailed(f"can't {what}: the program ended with code {done.returncode}", fix=fix)


def _version() -> str:
    try:
        return version("rollout-rl")
    except PackageNotFoundError:
        return ""
