"""Rewards: what a plugin is given, what it may return, and how it is loaded and called.

A reward is a function in a file of the user's, named in the configuration as ``file.py:function``::

    def exact_match(samples):
        return [float(sample.completion == sample.row["answer"]) for sample in samples]

It takes a list of :class:`Sample` and returns one item for each, in order: a number, or a mapping with the number
``reward`` and further named numbers (metrics). A mapping may reward parts of a completion too, beside ``reward`` or
instead: with ``token_rewards``, one number for each of ``sample.token_ids``, or with ``step_rewards``, mappings of
``start``, ``end`` (characters of the completion) and ``reward``, which counts at the last token of its step::

    return [{"reward": 1.0, "step_rewards": [{"start": 0, "end": 17, "reward": 0.5}]} for _ in samples]

A function may be ``async def``. Whatever goes wrong has a type of its own and is never a reward of 0:
:class:`RewardImportError`, :class:`RewardFailed`, :class:`RewardShapeError` and :class:`RewardTimeout`.

    >>> function = load_reward("reward.py:exact_match", base_dir="/home/me/run")
    >>> call_reward(function, [Sample("1+1=", "2", {"prompt": "1+1=", "answer": "2"})])
    [Score(reward=1.0, metrics={})]
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import difflib
import functools
import hashlib
import importlib.util
import inspect
import linecache
import math
import os
import sys
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, SupportsFloat, cast

from rollout.errors import Place, RolloutError

__all__ = [
    "RewardError",
    "RewardFailed",
    "RewardFunction",
    "RewardImportError",
    "RewardShapeError",
    "RewardTimeout",
    "Sample",
    "Score",
    "Step",
    "call_reward",
    "call_reward_async",
    "load_reward",
    "split_plugin",
]


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion to be scored."""

    prompt: str  # as the model read it, special tokens left out
    completion: str  # what the model said, special tokens and stop text left out
    row: Mapping[str, Any] = field(default_factory=lambda: {})  # the dataset's row that the prompt came from
    token_ids: Sequence[int] = ()  # tokens of the completion, its end among them


@dataclass(frozen=True, slots=True)
class Step:
    """What a part of a completion is worth: its characters ``start`` to ``end``, the latter left out."""

    start: int
    end: int
    reward: float


@dataclass(frozen=True, slots=True)
class Score:
    """What a sample is worth; every number is finite."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=lambda: {})
    token_rewards: Sequence[float] = ()  # one a token of the completion, or none
    steps: Sequence[Step] = ()  # ascending, none over another


RewardFunction = Callable[[Sequence[Sample]], Any]


class RewardError(RolloutError):
    """Base of everything that can go wrong with a reward."""


class RewardImportError(RewardError):
    """The file can't be read or imported, or has no such function."""

    reason = "REWARD_IMPORT"


class RewardFailed(RewardError):
    """The function raised; ``__cause__`` is what it raised."""

    reason = "REWARD_RAISED"


class RewardShapeError(RewardError):
    """The function returned something that is not one finite number a sample."""

    reason = "REWARD_BAD_RESULT"


class RewardTimeout(RewardError):
    """The function did not return within its time limit."""

    reason = "REWARD_TIMEOUT"


def split_plugin(plugin: str) -> tuple[str, str]:
    """Split ``file.py:function``. Raises :class:`RewardImportError`."""
    file, colon, name = plugin.rpartition(":")
    if not colon or not file or not name.isidentifier():
        raise RewardImportError(f"`{plugin}` names no function", mend="write it as `file.py:function`")
    return file, name


def load_reward(plugin: str, base_dir: str | os.PathLike[str] = ".") -> RewardFunction:
    """Import ``file.py:function`` relative to ``base_dir`` and return the function. Raises :class:`RewardImportError`.

    The module gets a name of its own, drawn from its path and content, so a changed file is a new module. Its folder
    comes first in ``sys.path`` while it is imported and last afterwards, so that it can import its neighbours without
    hiding installed packages from anybody else.
    """
    file, name = split_plugin(plugin)
    path = Path(os.path.abspath(os.path.join(base_dir, file)))
    module = _import(path, file)
    function = getattr(module, name, None)
    known = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
    if function is None:
        mend = f"it has {', '.join(f'`{n}`' for n in known)}" if known else f"define `def {name}(samples)` in it"
        raise RewardImportError(f"there is no function `{name}` in {file}", mend=mend, place=Place(str(path)))
    if not callable(function):
        kind = type(function).__name__
        mend = (
            f"name a function: it has {', '.join(f'`{n}`' for n in known)}"
            if known
            else f"make it a function: `def {name}(samples)`"
        )
        raise RewardImportError(f"`{name}` is of type {kind}, which can't be called", mend=mend, place=Place(str(path)))
    return cast(RewardFunction, function)


def call_reward(function: RewardFunction, samples: Sequence[Sample]) -> list[Score]:
    """Score ``samples`` (at least one), blocking; one :class:`Score` each, in order.

    An ``async def`` runs in an event loop of its own: call this from a thread that has none, else
    :func:`call_reward_async`. Raises :class:`RewardFailed` and :class:`RewardShapeError`.
    """
    with _raised(function):
        result = function(list(samples))
        if inspect.isawaitable(result):
            result = asyncio.run(_wait(result))
    return _scores(function, result, samples)


async def call_reward_async(
    function: RewardFunction,
    samples: Sequence[Sample],
    *,
    timeout_seconds: float,
    executor: concurrent.futures.Executor | None = None,
) -> list[Score]:
    """Like :func:`call_reward` without blocking the loop: ``async def`` runs on it, anything else in a thread of
    ``executor``. Raises :class:`RewardTimeout` too. Python can't kill a thread: one that never returns stays behind in
    the executor, so count timeouts and start anew when they repeat.
    """
    batch = list(samples)
    try:
        async with asyncio.timeout(timeout_seconds):
            with _raised(function):
                if inspect.iscoroutinefunction(function):
                    result = await function(batch)
                else:
                    loop = asyncio.get_running_loop()
                    result = await loop.run_in_executor(executor, functools.partial(_call, function, batch))
                    if inspect.isawaitable(result):
                        result = await result
    except TimeoutError:
        raise RewardTimeout(
            f"`{_name(function)}` took longer than {timeout_seconds:g} s for {len(batch)} samples",
            mend="make it faster or raise `reward.timeout_seconds`",
            place=_definition(function),
        ) from None
    return _scores(function, result, batch)


def _call(function: RewardFunction, batch: list[Sample]) -> Any:
    """Run in a thread, where a ``SystemExit`` or ``StopIteration`` would end or confuse more than the call."""
    with _raised(function):
        return function(batch)


async def _wait(awaitable: Any) -> Any:
    return await awaitable


@contextmanager
def _raised(function: RewardFunction) -> Generator[None]:
    """Turn what a reward raises into :class:`RewardFailed`, placed at the last line of the user's own files."""
    try:
        yield
    except (KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, RewardError):
        raise
    except BaseException as error:
        what = "called sys.exit" if isinstance(error, SystemExit) else f"raised {_one_line(error)}"
        raise RewardFailed(
            f"`{_name(function)}` {what}",
            mend="correct the function: it must score any completion, an empty one too"
            " (while a run trains, a group whose reward raises is tried again, then left out)",
            place=_last_frame(error, _folder(function)) or _definition(function),
        ) from error


def _scores(function: RewardFunction, result: Any, samples: Sequence[Sample]) -> list[Score]:
    def bad(what: str, mend: str) -> RewardShapeError:
        return RewardShapeError(f"`{_name(function)}` returned {what}", mend=mend, place=_definition(function))

    if hasattr(result, "tolist"):  # numpy, torch
        result = result.tolist()
    if isinstance(result, (str, bytes, Mapping)) or not isinstance(result, Sequence):
        mend = "return a list with one number, or one mapping with `reward`, for each sample"
        raise bad(_kind(cast(object, result)), mend)
    items = cast(Sequence[Any], result)
    if len(items) != len(samples):
        raise bad(f"{len(items)} items for {len(samples)} samples", "return exactly one item for each sample, in order")
    return [_score(item, sample, index, bad) for index, (item, sample) in enumerate(zip(items, samples, strict=True))]


Bad = Callable[[str, str], RewardShapeError]


def _score(item: Any, sample: Sample, index: int, bad: Bad) -> Score:
    if not isinstance(item, Mapping):
        return Score(_number(item, f"item {index}", bad))
    entries = dict(cast(Mapping[Any, Any], item))
    tokens, steps = entries.pop("token_rewards", None), entries.pop("step_rewards", None)
    if tokens is None and steps is None and "reward" not in entries:
        raise bad(f"a mapping without `reward` as item {index}", 'add the key: {"reward": 1.0, ...}')
    numbers = {str(key): _number(value, f"`{key}` of item {index}", bad) for key, value in entries.items()}
    return Score(
        numbers.pop("reward", 0.0),
        numbers,
        () if tokens is None else _token_rewards(tokens, sample, f"`token_rewards` of item {index}", bad),
        () if steps is None else _steps(steps, sample, f"`step_rewards` of item {index}", bad),
    )


def _token_rewards(value: Any, sample: Sample, where: str, bad: Bad) -> tuple[float, ...]:
    items = _list(value, where, bad)
    if len(items) != len(sample.token_ids):
        told = f"{len(items)} `token_rewards` for the {len(sample.token_ids)} tokens of a completion"
        raise bad(told, "return one number for each of `sample.token_ids`, or `step_rewards` with characters")
    return tuple(_number(item, f"an item of {where}", bad) for item in items)


def _steps(value: Any, sample: Sample, where: str, bad: Bad) -> tuple[Step, ...]:
    mend = 'write {"start": 0, "end": 17, "reward": 0.5}: characters of the completion, ascending, none over another'
    found: list[Step] = []
    for item in _list(value, where, bad):
        if not isinstance(item, Mapping) or set(cast(Mapping[Any, Any], item)) != {"start", "end", "reward"}:
            raise bad(f"no mapping of `start`, `end` and `reward` as an item of {where}", mend)
        entries = cast(Mapping[str, Any], item)
        start, end = entries["start"], entries["end"]
        before = found[-1].end if found else 0
        if not isinstance(start, int) or not isinstance(end, int) or not before <= start < end <= len(sample.completion):
            told = f"the step {start!r} to {end!r} in {where}, of a completion with {len(sample.completion)} characters"
            raise bad(told + (f" and a step before it that ends at {before}" if found else ""), mend)
        found.append(Step(start, end, _number(entries["reward"], f"the reward of a step in {where}", bad)))
    return tuple(found)


def _list(value: Any, where: str, bad: Bad) -> Sequence[Any]:
    if hasattr(value, "tolist"):  # numpy, torch
        value = value.tolist()
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise bad(f"{_kind(cast(object, value))} as {where}", "return a list")
    return cast(Sequence[Any], value)


def _number(value: Any, where: str, bad: Bad) -> float:
    mend = "return one finite number for each sample"
    try:
        number = float(value) if isinstance(value, SupportsFloat) else None
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = None
    if number is None:
        raise bad(f"{_kind(value)} as {where}", mend)
    if not math.isfinite(number):
        raise bad(f"{number} as {where}", mend)
    return number


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _import(path: Path, file: str) -> ModuleType:
    try:
        source = path.read_bytes()
    except OSError as error:
        mend = "correct the path, which starts at the configuration's folder"
        raise RewardImportError(f"can't read {file}: {error.strerror}", mend=mend, place=Place(str(path))) from error
    digest = hashlib.sha256(os.fsencode(path) + b"\0" + source).hexdigest()[:16]
    name = f"_rollout_reward_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RewardImportError(f"{file} is no Python file", mend="name a file that ends with .py", place=Place(str(path)))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _neighbours(path.parent):
            # Not exec_module: its bytecode cache knows a file by size and second, so it may run what stood there before.
            exec(compile(source, path, "exec"), module.__dict__)
    except (KeyboardInterrupt, GeneratorExit):
        sys.modules.pop(name, None)
        raise
    except SyntaxError as error:
        sys.modules.pop(name, None)
        raise RewardImportError(
            f"syntax error: {error.msg}", mend="correct the line", place=_syntax_place(error, path)
        ) from error
    except BaseException as error:
        sys.modules.pop(name, None)
        what = "calls sys.exit" if isinstance(error, SystemExit) else f"raises {_one_line(error)}"
        mend = "run `python " + file + "` to see it alone"
        if isinstance(error, ModuleNotFoundError) and error.name:
            mend = _missing(error.name, path, file)
        place = _last_frame(error, path.parent) or Place(str(path))
        raise RewardImportError(f"importing {file} {what}", mend=mend, place=place) from error
    return module


def _missing(name: str, path: Path, file: str) -> str:
    """What to do about a module that is not there: a typo of a file of the user's is likelier than a package to install."""
    top = name.partition(".")[0]
    here = sorted({entry.stem for entry in path.parent.iterdir() if entry.suffix == ".py" or (entry / "__init__.py").exists()})
    near = difflib.get_close_matches(top, [stem for stem in here if stem != path.stem], n=1)
    if near:
        return f"did you mean `{near[0]}`, which lies beside {file}?"
    return (
        f"correct the name: there is no {top}.py beside {file} and no package `{top}` in the workers' Python ({sys.executable});"
        " if it is a package, install it there"
    )


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


def _last_frame(error: BaseException, folder: Path | None) -> Place | None:
    """The innermost line of a traceback that lies in ``folder``."""
    if folder is None:
        return None
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).is_relative_to(folder) and "site-packages" not in frame.filename:
            text = linecache.getline(frame.filename, frame.lineno or 0).rstrip("\n")
            column = len(text) - len(text.lstrip()) + 1
            return Place(frame.filename, frame.lineno or 0, column, text)
    return None


def _definition(function: RewardFunction) -> Place | None:
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return None
    lines = linecache.getlines(code.co_filename)
    for number, text in enumerate(lines[code.co_firstlineno - 1 :], code.co_firstlineno):
        if "def " in text:  # decorators stand above
            return Place(code.co_filename, number, text.index("def ") + 1, text.rstrip("\n"))
    return Place(code.co_filename, code.co_firstlineno)


def _folder(function: RewardFunction) -> Path | None:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return Path(code.co_filename).parent if code else None


def _name(function: RewardFunction) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
