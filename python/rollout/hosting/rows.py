"""Data sources: functions that have the rows of a data set::

    def sums(split):
        numbers = random.Random(split)
        for _ in range(1000):
            a, b = numbers.randrange(100), numbers.randrange(100)
            yield {"prompt": f"{a}+{b}=", "answer": str(a + b)}

``split`` is ``data.train_split`` or ``data.eval_split``. The rows of a split must be the same each
time: the planner reads them once and pins their digest.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, cast

from rollout.errors import RolloutError
from rollout.plugin.loading import load_object, split_plugin
from rollout.plugin.place import definition, folder_of, last_frame, one_line
from rollout.plugin.score import RewardImportError
from rollout.source.errors import BadSource
from rollout.source.formats import to_json

PAGE = 1024
"""Rows of one call."""


class RowsFailed(RolloutError):
    """A data source raised."""

    reason: ClassVar[str] = "DATA_SOURCE_RAISED"


class RowsBadResult(RolloutError):
    """A data source has something else than rows."""

    reason: ClassVar[str] = "DATA_SOURCE_BAD_RESULT"


class RowsImport(RolloutError):
    """The file of a data source can't be imported, or its function can't be called."""

    reason: ClassVar[str] = "DATA_SOURCE_IMPORT"


class Rows:
    """The rows of a data source by index. It continues where the last call of a split ended, and
    otherwise starts again, so that the rows of an index do not depend on the calls."""

    def __init__(self, function: Callable[[str], Iterable[Any]], name: str) -> None:
        """name: of the function."""
        self._function, self._name = function, name
        self._open: dict[str, tuple[int, Iterator[Any]]] = {}
        self._one_at_a_time = threading.Lock()

    def read(self, split: str, offset: int, limit: int) -> tuple[list[bytes], bool]:
        """At most ``limit`` rows from ``offset`` on, and whether no row follows. Raises
        ``RowsFailed``, ``RowsBadResult``."""
        with self._one_at_a_time:
            return self._read(split, offset, limit)

    def _read(self, split: str, offset: int, limit: int) -> tuple[list[bytes], bool]:
        at, rows = self._open.pop(split, (0, None))
        if rows is None or at != offset:
            at, rows = 0, self._begin(split)
        found: list[bytes] = []
        while len(found) < limit:
            try:
                row = next(rows)
            except StopIteration:
                return found, True
            except Exception as error:
                place = last_frame(error, folder_of(cast(Any, self._function)))
                raise RowsFailed(
                    f"`{self._name}({split!r})` raises {one_line(error)} at row {at + 1}", fix="correct the function", place=place
                ) from error
            if at >= offset:
                found.append(self._json(row, at + 1))
            at += 1
        self._open[split] = (at, rows)
        return found, False

    def _begin(self, split: str) -> Iterator[Any]:
        fix = 'yield mappings, such as `{"prompt": "1+1=", "answer": "2"}`'
        place = definition(cast(Any, self._function))
        try:
            made: Any = self._function(split)
        except Exception as error:
            where = last_frame(error, folder_of(cast(Any, self._function)))
            raise RowsFailed(
                f"`{self._name}({split!r})` raises {one_line(error)}", fix="correct the function", place=where
            ) from error
        if isinstance(made, str | bytes | Mapping) or not isinstance(made, Iterable):
            raise RowsBadResult(f"`{self._name}` returned {type(cast(Any, made)).__name__}, not rows", fix=fix, place=place)
        return iter(cast("Iterable[Any]", made))

    def _json(self, row: Any, number: int) -> bytes:
        place = definition(cast(Any, self._function))
        if not isinstance(row, Mapping):
            raise RowsBadResult(
                f"row {number} of `{self._name}` is of type {type(row).__name__}, not a mapping",
                fix='yield mappings, such as `{"prompt": "1+1=", "answer": "2"}`',
                place=place,
            )
        try:
            return to_json(cast("Mapping[str, Any]", row), f"row {number} of `{self._name}`")
        except BadSource as error:
            raise RowsBadResult(error.message, fix=error.fix, place=place) from error


def load_rows(plugin: str, base_dir: str | os.PathLike[str] = ".") -> Rows:
    """Import the function of a data source. Raises ``RowsImport``."""
    try:
        function = load_object(plugin, base_dir, kind="data_source")
    except RewardImportError as error:
        raised = RowsImport(error.message, fix=error.fix.replace("(samples)", "(split)"), place=error.place)
        if error.reason != RewardImportError.reason:
            raised.__dict__["reason"] = error.reason
        raise raised from error
    name = split_plugin(plugin)[1]
    try:
        inspect.signature(function).bind("train")
    except (TypeError, ValueError):
        raise RowsImport(
            f"`{name}` can't be called with the name of a split: it is `{name}{inspect.signature(function)}`",
            fix=f"write `def {name}(split)`, and yield a mapping for each row",
            place=definition(function),
        ) from None
    return Rows(function, name)
