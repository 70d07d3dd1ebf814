"""Reads the rows of one file. The ending of its name selects the format. Each row is JSON text."""

from __future__ import annotations

import csv
import gzip
import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import IO, Any, cast
from uuid import UUID

from rollout.errors import Place
from rollout.source.errors import BadSource, LibraryMissing, MissingFile

Row = Mapping[str, Any]


def ending_of(path: str) -> str:
    """The known ending of a file's name, such as ``.csv`` for ``a.csv.gz``; "" without one."""
    ending = Path(path.removesuffix(".gz")).suffix
    return ending if ending in _READERS and (not path.endswith(".gz") or ending in _TEXTS) else ""


def read_file(path: str) -> Iterator[bytes]:
    """The rows of a file. A file without a known ending is JSON Lines. Raises
    :class:`MissingFile`, :class:`BadSource`, :class:`LibraryMissing`."""
    read = _READERS.get(ending_of(path), _json_lines)
    try:
        yield from read(path)
    except OSError as error:
        if error.errno is None:  # pyarrow raises such errors for damaged files
            raise BadSource(f"{path} is damaged: {error}", fix="write the file again") from error
        raise MissingFile(f"can't read {path}: {error.strerror}", fix="correct the path") from error
    except BadSource:
        raise
    except (ValueError, EOFError, csv.Error) as error:  # pyarrow.ArrowInvalid is a ValueError
        raise BadSource(f"{path} can't be read as {ending_of(path) or '.jsonl'}: {error}", fix=_FIX) from error


def to_json(row: Row, where: str) -> bytes:
    """A row as JSON. Times become ISO 8601 texts, decimals become texts, NaN becomes null. where:
    what messages call the row. Raises :class:`BadSource` for a value that JSON can't represent."""
    try:
        try:
            return json.dumps(row, ensure_ascii=False, allow_nan=False, default=_plain).encode()
        except ValueError:  # NaN or infinity
            return json.dumps(_without_nan(row), ensure_ascii=False, allow_nan=False, default=_plain).encode()
    except (TypeError, ValueError) as error:
        column = next((name for name, value in row.items() if not _representable(value)), "")
        raise BadSource(
            f"column `{column}` of {where} has a value that JSON can't represent: {error}",
            fix="remove the column, or convert it to texts, numbers, lists, or mappings",
        ) from error


def library(name: str, purpose: str, extra: str) -> Any:
    """A module of an optional library. Raises :class:`LibraryMissing`."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise LibraryMissing(
            f"{purpose} needs the library {package}, which is not installed",
            fix=f"install it: `{sys.executable} -m pip install {package}`, which is in the extra `rollout-workers[{extra}]`",
        ) from error


def _json_lines(path: str) -> Iterator[bytes]:
    with _binary(path) as file:
        for number, line in enumerate(file, 1):
            if not (row := line.strip()):
                continue
            place = Place(path, number)
            try:
                value: Any = json.loads(row)
            except ValueError as error:
                raise BadSource(f"the row is not JSON: {error}", fix="write one JSON object per line", place=place) from error
            if not isinstance(value, dict):
                kind = type(value).__name__
                raise BadSource(f"the row is a {kind}, not an object", fix="write one JSON object per line", place=place)
            if b"\\ud" in row.lower():
                _refuse_surrogates(value, place)
            yield row


def _refuse_surrogates(value: Any, place: Place) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        message = "the row contains a lone surrogate, which is not a character"
        raise BadSource(message, fix="escape whole characters", place=place) from error


def _csv(path: str, delimiter: str = ",") -> Iterator[bytes]:
    """Every value is a text: a CSV file has no types."""
    csv.field_size_limit(sys.maxsize)
    opened = gzip.open if path.endswith(".gz") else open
    with cast("IO[str]", opened(path, "rt", encoding="utf-8-sig", newline="")) as file:
        reader = csv.reader(file, delimiter=delimiter)
        columns = next(reader, None)
        if columns is None:
            return
        if len(set(columns)) < len(columns) or "" in columns:
            raise BadSource("the first line does not name each column once", fix="write a header", place=Place(path, 1))
        for values in reader:
            if not values:
                continue
            place = Place(path, reader.line_num)
            if len(values) != len(columns):
                message = f"the row has {len(values)} values, the header has {len(columns)}"
                raise BadSource(message, fix="quote values with commas or line breaks", place=place)
            yield to_json(dict(zip(columns, values, strict=True)), str(place))


def _tsv(path: str) -> Iterator[bytes]:
    return _csv(path, "\t")


def _parquet(path: str) -> Iterator[bytes]:
    parquet = library("pyarrow.parquet", "a Parquet file", "formats")
    with parquet.ParquetFile(path) as file:
        yield from _batches(file.iter_batches(), path)


def _arrow(path: str) -> Iterator[bytes]:
    """The file format or the stream format of Arrow, which ``save_to_disk`` writes."""
    arrow = library("pyarrow", "an Arrow file", "formats")
    with arrow.memory_map(path) as file:
        magic = bytes(file.read(6))
        file.seek(0)
        reader = arrow.ipc.open_file(file) if magic == b"ARROW1" else arrow.ipc.open_stream(file)
        with reader:
            batches = (reader.get_batch(n) for n in range(reader.num_record_batches)) if magic == b"ARROW1" else reader
            yield from _batches(batches, path)


def _batches(batches: Any, path: str) -> Iterator[bytes]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield to_json(row, f"row {number} of {path}")


def _binary(path: str) -> AbstractContextManager[IO[bytes]]:
    return cast("IO[bytes]", gzip.open(path, "rb")) if path.endswith(".gz") else Path(path).open("rb")


def _plain(value: Any) -> Any:
    match value:
        case date() | time():  # a datetime is a date
            return value.isoformat()
        case Decimal() | UUID():
            return str(value)
        case _:
            raise TypeError(f"a value of type {type(value).__name__}")


def _without_nan(value: Any) -> Any:
    match value:
        case float():
            return None if math.isnan(value) else value
        case dict():
            return {key: _without_nan(item) for key, item in cast("dict[str, Any]", value).items()}
        case list():
            return [_without_nan(item) for item in cast("list[Any]", value)]
        case _:
            return value


def _representable(value: Any) -> bool:
    try:
        json.dumps(_without_nan(value), ensure_ascii=False, allow_nan=False, default=_plain).encode()
    except (TypeError, ValueError):
        return False
    return True


_FIX = "use a file of the format that its ending names"
_TEXTS = (".jsonl", ".ndjson", ".csv", ".tsv")
_READERS: dict[str, Callable[[str], Iterator[bytes]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".parquet": _parquet,
    ".csv": _csv,
    ".tsv": _tsv,
    ".arrow": _arrow,
    ".feather": _arrow,
}
ENDINGS = tuple(_READERS)
