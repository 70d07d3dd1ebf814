"""Reads the rows of a dataset, JSON Lines or Parquet. Each row becomes JSON text, from which
prompts and rewards are built."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from blake3 import blake3

from rollout.errors import Place
from rollout_workers.offline.errors import BadDataset, LibraryMissing, MissingFile


def digest(path: str) -> str:
    """``blake3-<hex>`` of a file's bytes. Raises :class:`MissingFile`."""
    try:
        return "blake3-" + blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
    except OSError as error:
        raise MissingFile(f"can't read {path}: {error.strerror}", fix="correct the path") from error


def read_rows(path: str, limit: int) -> list[bytes]:
    """The first ``limit`` rows (0: all), in order. Blank lines do not count. Raises
    :class:`BadDataset`, :class:`MissingFile`, :class:`LibraryMissing`."""
    rows = _parquet(path, limit) if path.endswith(".parquet") else _lines(path, limit)
    if not rows:
        raise BadDataset(f"{path} has no rows", fix="name another dataset with --data")
    return rows


def _lines(path: str, limit: int) -> list[bytes]:
    rows: list[bytes] = []
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                rows.append(line.strip())
                _check(rows[-1], Place(path, number))
                if len(rows) == limit:
                    break
    except OSError as error:
        raise MissingFile(f"can't read {path}: {error.strerror}", fix="correct the path") from error
    return rows


def _check(line: bytes, place: Place) -> None:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise BadDataset(f"the row is not JSON: {error}", fix="write one JSON object per line", place=place) from error
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadDataset(
            "the row contains a lone surrogate, which is not a character", fix="escape whole characters", place=place
        ) from error
    if not isinstance(row, dict):
        raise BadDataset(f"the row is a {type(row).__name__}, not an object", fix="write one JSON object per line", place=place)


def _parquet(path: str, limit: int) -> list[bytes]:
    parquet = library()
    rows: list[bytes] = []
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for number, row in enumerate(batch.to_pylist(), len(rows)):
                    rows.append(_row(row, path, number))
                    if len(rows) == limit:
                        return rows
    except FileNotFoundError as error:
        raise MissingFile(f"can't read {path}: {error.strerror}", fix="correct the path") from error
    except (OSError, ValueError) as error:  # pyarrow.ArrowInvalid is a ValueError
        raise BadDataset(f"{path} is not a Parquet file: {error}") from error
    return rows


def _row(row: dict[str, Any], path: str, number: int) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise BadDataset(
            f"row {number} of {path} has a value that JSON can't represent: {error}", fix="use text, numbers, lists, mappings"
        ) from error


def library() -> Any:
    """``pyarrow.parquet``. Raises :class:`LibraryMissing`."""
    try:
        import pyarrow.parquet

        return pyarrow.parquet
    except ImportError as error:
        raise LibraryMissing(
            "Parquet needs the library pyarrow",
            fix=f"install it: `{sys.executable} -m pip install pyarrow`, or use a .jsonl file",
        ) from error
