"""Imports a reward from a user's file."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from rollout.errors import Place
from rollout.plugin.installed import EntryPointInvalid, PluginNotInstalled, is_installed, load_installed
from rollout.plugin.place import definition, last_frame, missing_module, one_line
from rollout.plugin.score import RewardFunction, RewardImportError


def split_plugin(plugin: str) -> tuple[str, str]:
    """Split ``file.py:function``, or ``DISTRIBUTION:NAME``. Raises :class:`RewardImportError`."""
    file, colon, name = plugin.rpartition(":")
    if not colon or not file or not name.isidentifier():
        raise RewardImportError(f"`{plugin}` has no function name", fix="write it as `file.py:function`")
    return file, name


def folder_of_file(plugin: str, base_dir: str | os.PathLike[str]) -> Path:
    """The folder of ``file.py:NAME`` or ``plugin.toml:NAME``."""
    return Path(os.path.abspath(os.path.join(base_dir, split_plugin(plugin)[0]))).parent


def load_reward(plugin: str, base_dir: str | os.PathLike[str] = ".", *, kind: str = "reward") -> RewardFunction:
    """Import ``file.py:function`` relative to ``base_dir``, or ``DISTRIBUTION:NAME`` of an
    installed package, and return the function. kind: of the plugin. Raises
    :class:`RewardImportError`.

    The module's name is a hash of its path and content, so a changed file is a new module. Its
    folder is first in ``sys.path`` during the import and last afterwards. So the module can import
    files next to it, and does not hide installed packages from other modules.
    """
    function, name = _load(plugin, base_dir, kind)
    try:
        inspect.signature(function).bind([])
    except TypeError:
        raise RewardImportError(
            f"`{name}` can't be called with one list of samples: it is `{name}{inspect.signature(function)}`",
            fix=f"write `def {name}(samples)`, where each sample has `prompt`, `completion` and the dataset's `row`",
            place=definition(function),
        ) from None
    except ValueError:  # a builtin has no signature
        pass
    return cast(RewardFunction, function)


def load_object(plugin: str, base_dir: str | os.PathLike[str] = ".", *, kind: str = "") -> Any:
    """Import ``file.py:name`` like :func:`load_reward`, for plugins whose arguments are not
    checked."""
    return _load(plugin, base_dir, kind)[0]


def _load(plugin: str, base_dir: str | os.PathLike[str], kind: str) -> tuple[Any, str]:
    file, name = split_plugin(plugin)
    if is_installed(plugin):
        try:
            return load_installed(plugin, kind), name
        except (PluginNotInstalled, EntryPointInvalid) as error:
            raised = RewardImportError(error.message, fix=error.fix)
            raised.__dict__["reason"] = error.reason
            raise raised from error
    path = Path(os.path.abspath(os.path.join(base_dir, file)))
    module = _import(path, file)
    function = getattr(module, name, None)
    known = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
    if function is None:
        fix = f"it has {', '.join(f'`{n}`' for n in known)}" if known else f"define `def {name}(samples)` in the file"
        raise RewardImportError(f"no function `{name}` is defined in {file}", fix=fix, place=Place(str(path)))
    if not callable(function):
        kind = type(function).__name__
        fix = (
            f"name a function: it has {', '.join(f'`{n}`' for n in known)}"
            if known
            else f"make it a function: `def {name}(samples)`"
        )
        raise RewardImportError(f"`{name}` is of type {kind}, which can't be called", fix=fix, place=Place(str(path)))
    return function, name


def _import(path: Path, file: str) -> ModuleType:
    try:
        source = path.read_bytes()
    except OSError as error:
        fix = "correct the path, which starts at the configuration's folder"
        raise RewardImportError(f"can't read {file}: {error.strerror}", fix=fix, place=Place(str(path))) from error
    digest = hashlib.sha256(os.fsencode(path) + b"\0" + source).hexdigest()[:16]
    name = f"_rollout_reward_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RewardImportError(f"{file} is not a Python file", fix="name a file that ends with .py", place=Place(str(path)))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _neighbours(path.parent):
            # Not exec_module, because its bytecode cache identifies a file by size and second, and
            # could return an older version.
            exec(compile(source, path, "exec"), module.__dict__)
    except (KeyboardInterrupt, GeneratorExit):
        sys.modules.pop(name, None)
        raise
    except SyntaxError as error:
        sys.modules.pop(name, None)
        raise RewardImportError(f"syntax error: {error.msg}", fix="correct the line", place=_syntax_place(error, path)) from error
    except BaseException as error:
        sys.modules.pop(name, None)
        what = "calls sys.exit" if isinstance(error, SystemExit) else f"raises {one_line(error)}"
        fix = "run `python " + file + "` to reproduce it"
        if isinstance(error, ModuleNotFoundError) and error.name:
            fix = missing_module(error.name, path, file)
        place = last_frame(error, path.parent) or Place(str(path))
        raise RewardImportError(f"importing {file} {what}", fix=fix, place=place) from error
    return module


@contextmanager
def _neighbours(folder: Path) -> Generator[None]:
    entry = str(folder)
    before = entry in sys.path
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)
        if not before:
            sys.path.append(entry)


def _syntax_place(error: SyntaxError, path: Path) -> Place:
    text = (error.text or "").rstrip("\n")
    return Place(error.filename or str(path), error.lineno or 0, error.offset or 0, text)
