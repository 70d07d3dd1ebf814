"""Finds the lines of the user's code to which errors refer."""

from __future__ import annotations

import difflib
import inspect
import linecache
import sys
import traceback
from pathlib import Path

from rollout.errors import Place
from rollout.plugin.score import RewardFunction


def last_frame(error: BaseException, folder: Path | None) -> Place | None:
    """The innermost line of a traceback that is in a file of ``folder``."""
    if folder is None:
        return None
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).is_relative_to(folder) and "site-packages" not in frame.filename:
            text = linecache.getline(frame.filename, frame.lineno or 0).rstrip("\n")
            column = len(text) - len(text.lstrip()) + 1
            return Place(frame.filename, frame.lineno or 0, column, text)
    return None


def definition(function: RewardFunction) -> Place | None:
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return None
    lines = linecache.getlines(code.co_filename)
    for number, text in enumerate(lines[code.co_firstlineno - 1 :], code.co_firstlineno):
        if "def " in text:  # decorators stand above
            return Place(code.co_filename, number, text.index("def ") + 1, text.rstrip("\n"))
    return Place(code.co_filename, code.co_firstlineno)


def folder_of(function: RewardFunction) -> Path | None:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return Path(code.co_filename).parent if code else None


def name_of(function: RewardFunction) -> str:
    return getattr(function, "__name__", type(function).__name__)


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def missing_module(name: str, path: Path, file: str) -> str:
    """The fix for a module that ``path``, shown as ``file``, does not find. A typo in the name of a
    user's file is more likely than a missing package."""
    top = name.partition(".")[0]
    here = sorted({entry.stem for entry in path.parent.iterdir() if entry.suffix == ".py" or (entry / "__init__.py").exists()})
    near = difflib.get_close_matches(top, [stem for stem in here if stem != path.stem], n=1)
    if near:
        return f"did you mean `{near[0]}`, which is next to {file}?"
    return (
        f"correct the name: there is no {top}.py next to {file} and no package `{top}` in the workers' Python ({sys.executable});"
        " if it is a package, install it there"
    )
