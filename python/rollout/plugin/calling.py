"""Calls a reward function and converts what it raises."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollout.plugin.place import definition, folder_of, last_frame, missing_module, name_of, one_line
from rollout.plugin.result import scores
from rollout.plugin.score import RewardError, RewardFailed, RewardFunction, RewardTimeout, Sample, Score


def call_reward(function: RewardFunction, samples: Sequence[Sample]) -> list[Score]:
    """Score ``samples`` (at least one); blocks. Returns one :class:`Score` for each, in order.

    An ``async def`` runs in a new event loop. If the thread already runs a loop, use
    :func:`call_reward_async`. Raises :class:`RewardFailed` and :class:`RewardShapeError`.
    """
    with _raised(function):
        result = function(list(samples))
        if inspect.isawaitable(result):
            result = asyncio.run(_wait(result))
    return scores(function, result, samples)


async def call_reward_async(
    function: RewardFunction,
    samples: Sequence[Sample],
    *,
    timeout_seconds: float,
    executor: concurrent.futures.Executor | None = None,
) -> list[Score]:
    """Like :func:`call_reward`, without blocking the loop: ``async def`` runs on the loop, other
    functions in a thread of ``executor``. Also raises :class:`RewardTimeout`. Python can't stop a
    thread, so a function that never returns occupies its thread forever; count timeouts and replace
    the executor when they repeat."""
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
            f"`{name_of(function)}` took longer than {timeout_seconds:g} s for {len(batch)} samples",
            fix="make it faster or raise `reward.timeout_seconds`",
            place=definition(function),
        ) from None
    return scores(function, result, batch)


def _call(function: RewardFunction, batch: list[Sample]) -> Any:
    """Run in a thread, because a ``SystemExit`` or ``StopIteration`` would affect the caller."""
    with _raised(function):
        return function(batch)


async def _wait(awaitable: Any) -> Any:
    return await awaitable


@contextmanager
def _raised(function: RewardFunction) -> Generator[None]:
    """Convert an exception of the reward to :class:`RewardFailed`. Its place is the last line in
    the user's own files."""
    try:
        yield
    except (KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, RewardError):
        raise
    except BaseException as error:
        what = "called sys.exit" if isinstance(error, SystemExit) else f"raised {one_line(error)}"
        code = definition(function)
        fix = (
            "correct the function: it must score every completion, including an empty one"
            " (during training a group whose reward raises is retried, then excluded)"
        )
        if isinstance(error, ModuleNotFoundError) and error.name and code:
            fix = missing_module(error.name, Path(code.file), Path(code.file).name)
        raise RewardFailed(
            f"`{name_of(function)}` {what}",
            fix=fix,
            place=last_frame(error, folder_of(function)) or definition(function),
        ) from error
