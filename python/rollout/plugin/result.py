"""Validates what a reward function returned."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsFloat, cast

from rollout.plugin.place import definition, name_of
from rollout.plugin.score import RewardFunction, RewardShapeError, Sample, Score, Step

OWN = frozenset({"mean", "std", "retries"})
"""Names that a step's metrics already use under ``reward/``. A metric of a reward with such a name
would be lost."""


LARGEST = 1e18
"""Largest magnitude of a reward. The standard deviation of rewards has their squares, and the
square of a larger number overflows float32."""


def flaw(reward: float) -> str:
    """Why a number can't be a reward; empty if it can.

    >>> flaw(1e300), flaw(0.5)
    ('1e+300, whose square overflows float32', '')
    """
    if not math.isfinite(reward):
        return f"{reward}"
    return f"{reward:.6g}, whose square overflows float32" if abs(reward) > LARGEST else ""


def scores(function: RewardFunction, result: Any, samples: Sequence[Sample]) -> list[Score]:
    def bad(what: str, fix: str) -> RewardShapeError:
        return RewardShapeError(f"`{name_of(function)}` returned {what}", fix=fix, place=definition(function))

    if hasattr(result, "tolist"):  # numpy, torch
        result = result.tolist()
    if isinstance(result, (str, bytes, Mapping)) or not isinstance(result, Sequence):
        fix = "return a list with one number, or one mapping with `reward`, for each sample"
        raise bad(_kind(cast(object, result)), fix)
    items = cast(Sequence[Any], result)
    if len(items) != len(samples):
        raise bad(f"{len(items)} items for {len(samples)} samples", "return exactly one item for each sample, in order")
    return [_score(item, sample, index, bad) for index, (item, sample) in enumerate(zip(items, samples, strict=True))]


Bad = Callable[[str, str], RewardShapeError]


def _score(item: Any, sample: Sample, index: int, bad: Bad) -> Score:
    if isinstance(item, float) or not isinstance(item, Mapping):
        return Score(_reward(item, f"item {index}", bad))
    entries = dict(cast(Mapping[Any, Any], item))
    tokens, steps = entries.pop("token_rewards", None), entries.pop("step_rewards", None)
    if tokens is None and steps is None and "reward" not in entries:
        raise bad(f"a mapping without `reward` as item {index}", 'add the key: {"reward": 1.0, ...}')
    if taken := OWN.intersection(map(str, entries)):
        problem = f"the metric `{min(taken)}` in item {index}, whose name the run already uses for `reward/{min(taken)}`"
        raise bad(problem, "give it another name")
    reward = _reward(entries.pop("reward", 0.0), f"`reward` of item {index}", bad)
    numbers = {str(key): _number(value, f"`{key}` of item {index}", bad) for key, value in entries.items()}
    return Score(
        reward,
        numbers,
        () if tokens is None else _token_rewards(tokens, sample, f"`token_rewards` of item {index}", bad),
        () if steps is None else _steps(steps, sample, f"`step_rewards` of item {index}", bad),
    )


def _token_rewards(value: Any, sample: Sample, where: str, bad: Bad) -> tuple[float, ...]:
    items = _list(value, where, bad)
    if len(items) != len(sample.token_ids):
        problem = f"{len(items)} `token_rewards` for the {len(sample.token_ids)} tokens of a completion"
        raise bad(problem, "return one number for each of `sample.token_ids`, or `step_rewards` with characters")
    return tuple(_reward(item, f"an item of {where}", bad) for item in items)


def _steps(value: Any, sample: Sample, where: str, bad: Bad) -> tuple[Step, ...]:
    fix = 'write {"start": 0, "end": 17, "reward": 0.5}: characters of the completion, in ascending order, without overlap'
    found: list[Step] = []
    for item in _list(value, where, bad):
        if not isinstance(item, Mapping) or set(cast(Mapping[Any, Any], item)) != {"start", "end", "reward"}:
            raise bad(f"no mapping of `start`, `end` and `reward` as an item of {where}", fix)
        entries = cast(Mapping[str, Any], item)
        start, end = entries["start"], entries["end"]
        before = found[-1].end if found else 0
        if not isinstance(start, int) or not isinstance(end, int) or not before <= start < end <= len(sample.completion):
            problem = f"the step {start!r} to {end!r} in {where}, of a completion with {len(sample.completion)} characters"
            raise bad(problem + (f" and a step before it that ends at {before}" if found else ""), fix)
        found.append(Step(start, end, _reward(entries["reward"], f"the reward of a step in {where}", bad)))
    return tuple(found)


def _list(value: Any, where: str, bad: Bad) -> Sequence[Any]:
    if hasattr(value, "tolist"):  # numpy, torch
        value = value.tolist()
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise bad(f"{_kind(cast(object, value))} as {where}", "return a list")
    return cast(Sequence[Any], value)


def _reward(value: Any, where: str, bad: Bad) -> float:
    number = _number(value, where, bad)
    if abs(number) > LARGEST:
        what = flaw(number).replace(",", f" as {where},", 1)
        raise bad(what, f"return numbers of at most {LARGEST:g} in magnitude, best from 0 to 1")
    return number


def _number(value: Any, where: str, bad: Bad) -> float:
    fix = "return one finite number for each sample"
    try:  # isinstance of a protocol is the last test, because it takes as long as everything else for a sample
        number = float(value) if isinstance(value, (float, int, SupportsFloat)) else None
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = None
    if number is None:
        raise bad(f"{_kind(value)} as {where}", fix)
    if not math.isfinite(number):
        raise bad(f"{number} as {where}", fix)
    return number


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
