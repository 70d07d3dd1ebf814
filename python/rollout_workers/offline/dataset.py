"""Reads the rows of a dataset. Each row is JSON text, from which prompts and rewards are built."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from blake3 import blake3

from rollout.source.formats import library as _library
from rollout.source.prepare import Source, open_source
from rollout_workers.offline.errors import BadDataset, MissingFile


@dataclass(frozen=True, slots=True)
class Dataset:
    """commit: of a data set of the hub, otherwise "". dropped: rows that were too long."""

    rows: list[bytes]
    commit: str = ""
    dropped: int = 0

    @property
    def digest(self) -> str:
        """``blake3-<hex>`` of the rows, one per line."""
        return "blake3-" + blake3(b"".join(row + b"\n" for row in self.rows)).hexdigest()


def digest(path: str) -> str:
    """``blake3-<hex>`` of a file's bytes. Raises :class:`MissingFile`."""
    try:
        return "blake3-" + blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
    except OSError as error:
        raise MissingFile(f"can't read {path}: {error.strerror}", fix="correct the path") from error


def read_rows(path: str, limit: int, *, base_dir: str = "", subset: str = "", split: str = "test") -> Dataset:
    """The first ``limit`` rows (0: all), in order. path, subset, split: as in ``data.eval``. Raises
    :class:`BadDataset`, ``SourceError``."""
    opened = open_source(Source(path, subset=subset, split=split), base_dir)
    rows: Iterable[bytes] = opened.rows()
    found = list(islice(rows, limit)) if limit else list(rows)
    if not found:
        raise BadDataset(f"{path} has no rows", fix="name another dataset with --data")
    return Dataset(found, opened.commit)


def library() -> Any:
    """``pyarrow.parquet``. Raises ``LibraryMissing``."""
    return _library("pyarrow.parquet", "a Parquet file", "formats")
