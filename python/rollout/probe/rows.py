"""The rows of data sources, for ``rollout.source.prepare``. A source is ``file.py:function``,
``plugin.toml:NAME``, or ``DISTRIBUTION:NAME``."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollout.errors import RolloutError
from rollout.hosting.manifest import is_manifest, read_manifest
from rollout.hosting.rows import PAGE, load_rows
from rollout.hosting.supervised import SupervisedSidecar
from rollout.plugin.installed import is_installed, package
from rollout.plugin.loading import folder_of_file
from rollout.plugin.v1 import plugin_pb2 as pb
from rollout.probe.reward import local_files
from rollout.source.errors import SourceError

_FILE = re.compile(r".+\.(py|toml):[A-Za-z_][A-Za-z0-9_]*")
_SECONDS = 600.0
"""Time in which a sidecar must return a page of rows."""


class DataSourceError(SourceError):
    """A data source failed. The reason is its own."""


def is_plugin(path: str) -> bool:
    """Whether a path of the configuration names a data source, not files."""
    return _FILE.fullmatch(path) is not None or is_installed(path)


def rows_of(plugin: str, base_dir: str, split: str) -> Iterator[bytes]:
    """The rows of a split, each JSON. Raises :class:`DataSourceError`."""
    try:
        yield from _sidecar(plugin, base_dir, split) if is_manifest(plugin) else _function(plugin, base_dir, split)
    except SourceError:
        raise
    except RolloutError as error:
        made = DataSourceError(error.message, fix=error.fix, place=error.place)
        made.__dict__["reason"] = error.reason
        raise made from error


def files_of(plugin: str, base_dir: str) -> list[str]:
    """The files that a plan pins, after the rows were read."""
    if is_installed(plugin):
        return []
    if is_manifest(plugin):
        return [str(path) for path in read_manifest(plugin, base_dir, kind="data_source").files]
    return local_files({Path(base_dir), folder_of_file(plugin, base_dir)})


def package_of_source(plugin: str) -> dict[str, Any] | None:
    """The package of ``DISTRIBUTION:NAME``, as a plan pins it; None of others."""
    return asdict(package(plugin, "data_source")) | {"kind": "data_source"} if is_installed(plugin) else None


def _function(plugin: str, base_dir: str, split: str) -> Iterator[bytes]:
    source = load_rows(plugin, base_dir)
    offset, end = 0, False
    while not end:
        rows, end = source.read(split, offset, PAGE)
        offset += len(rows)
        yield from map(_one_line, rows)


def _sidecar(plugin: str, base_dir: str, split: str) -> Iterator[bytes]:
    manifest = read_manifest(plugin, base_dir, kind="data_source")
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        sidecar: SupervisedSidecar = loop.run_until_complete(_made(manifest))
        try:
            loop.run_until_complete(sidecar.start())
            offset, end = 0, False
            while not end:
                request = pb.ReadRowsRequest(plugin=manifest.name, split=split, offset=offset, limit=PAGE)
                answer = loop.run_until_complete(sidecar.call("ReadRows", request, _SECONDS))
                offset, end = offset + len(answer.rows_json), answer.end
                yield from map(_one_line, answer.rows_json)
        finally:
            loop.run_until_complete(sidecar.close())


async def _made(manifest: Any) -> SupervisedSidecar:
    return SupervisedSidecar(manifest)  # belongs to the loop that runs


def _one_line(row: bytes) -> bytes:
    """The row without line breaks, which JSON may have between its parts."""
    return row if b"\n" not in row and b"\r" not in row else json.dumps(json.loads(row), ensure_ascii=False).encode()
