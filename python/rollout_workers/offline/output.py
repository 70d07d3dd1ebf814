"""The output: one record per sample, ordered by row and sample, as Parquet or JSON Lines. Equal
records give equal bytes.

- ``row``: index of the row in the dataset, from 0 (int64)
- ``sample``: index of the sample within the row, from 0 (int32)
- ``prompt``: the prompt without special tokens
- ``completion``: the completion without special tokens and stop text
- ``prompt_tokens``, ``completion_tokens``: counts of tokens (int32)
- ``finish_reason``: "stop" or "length"; null if nothing was sampled
- ``status``: COMPLETED, TRUNCATED (reached the token limit), or INFRA_FAILED
- ``reason``: reason of INFRA_FAILED, such as REWARD_TIMEOUT; otherwise null
- ``score``: the reward (float64); null without ``[reward]`` and for INFRA_FAILED
- ``score_parts``: additional numbers of the reward by name (Parquet: map<string, float64>)
- ``seed``: seed of the sample (int64)
- ``model_digest``: digest of the weights that sampled the completion
- ``data``: the dataset's row (Parquet: as JSON text)
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from rollout_workers.offline.dataset import library
from rollout_workers.offline.errors import CannotWrite

Record = dict[str, Any]
_ROW_GROUP = 8192


def write(path: str, records: Iterable[Record], inputs: Mapping[str, Any]) -> None:
    """Write to a temporary name, then rename, so that the file is either complete or absent.
    inputs: stored in a Parquet file's metadata as ``rollout.inputs``. Raises
    :class:`CannotWrite`."""
    if path.endswith(".parquet"):
        _whole(path, lambda temporary: _parquet(temporary, records, inputs))
    else:
        write_lines(path, records)


def write_lines(path: str, records: Iterable[Record]) -> None:
    """Write one JSON object per line; the file is either complete or absent. Raises
    :class:`CannotWrite`."""
    _whole(path, lambda temporary: _lines(temporary, records))


def _whole(path: str, write: Callable[[str], None]) -> None:
    temporary = path + ".part"
    try:
        write(temporary)
        _sync(temporary)
        os.replace(temporary, path)
        _sync(os.path.dirname(path))
    except OSError as error:
        with suppress(OSError):
            os.unlink(temporary)
        raise CannotWrite(
            f"can't write {path}: {error.strerror or error}",
            fix="free disk space and run the same command again; finished rows are kept",
        ) from error


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lines(path: str, records: Iterable[Record]) -> None:
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")


def _parquet(path: str, records: Iterable[Record], inputs: Mapping[str, Any]) -> None:
    parquet = library()
    import pyarrow as pa

    text, small = pa.string(), pa.int32()
    schema = pa.schema(
        [
            pa.field("row", pa.int64(), nullable=False),
            pa.field("sample", small, nullable=False),
            pa.field("prompt", text, nullable=False),
            pa.field("completion", text, nullable=False),
            pa.field("prompt_tokens", small, nullable=False),
            pa.field("completion_tokens", small, nullable=False),
            pa.field("finish_reason", text),
            pa.field("status", text, nullable=False),
            pa.field("reason", text),
            pa.field("score", pa.float64()),
            pa.field("score_parts", pa.map_(text, pa.float64()), nullable=False),
            pa.field("seed", pa.int64(), nullable=False),
            pa.field("model_digest", text, nullable=False),
            pa.field("data", text, nullable=False),
        ],
        metadata={"rollout.inputs": json.dumps(inputs, sort_keys=True)},
    )
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for part in _groups(records):
            writer.write_table(pa.Table.from_pylist([_flat(record) for record in part], schema=schema))


def _flat(record: Record) -> Record:
    return {
        **record,
        "score_parts": list(record["score_parts"].items()),
        "data": json.dumps(record["data"], ensure_ascii=False, separators=(",", ":")),
    }


def _groups(records: Iterable[Record]) -> Iterator[list[Record]]:
    part: list[Record] = []
    for record in records:
        part.append(record)
        if len(part) == _ROW_GROUP:
            yield part
            part = []
    if part:
        yield part
