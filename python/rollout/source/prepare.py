"""Writes the rows of one or several sources to a JSON Lines file.

Request, as the planner sends it::

    {"base_dir": "/...", "output": "/.../rows.tmp", "seed": 7, "until": "first_exhausted",
     "sources": [{"name": "math", "path": "data/*.parquet", "subset": "", "split": "train", "weight": 2.0,
                  "revision": "", "rename": {"question": "prompt"}, "booleans": ["label"], "numbers": []}]}

Answer::

    {"rows": 9500, "sources": [{"name": "math", "path": "data/*.parquet", "revision": "", "subset": "", "split": "",
                                "rows": 9500, "taken": 9500, "files": ["/.../data/1.parquet"]}]}

``baseline``, if it is there, is ``{"path": "base/chat.parquet", "limit": 0}``: completions that the
rows get (:mod:`rollout.source.baseline`), of which the first ``limit`` stay; 0: all. It is another
source of the answer, with the name ``baseline``.

``revision`` pins a data set of the hub to the commit of an older plan. ``booleans`` and ``numbers``
are fields that formats without types (CSV) have as texts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rollout.source import files, hub, mixture
from rollout.source.baseline import FIELD, with_baseline
from rollout.source.errors import BadSource, SourceError, SourceRefused
from rollout.source.formats import ending_of, read_file, to_json

Json = dict[str, Any]


class Plugins(Protocol):
    """Data sources, which are plugins; ``rollout.probe.rows`` is one."""

    def is_plugin(self, path: str) -> bool:
        """Whether a path of the configuration names a data source, not files."""
        ...

    def rows_of(self, plugin: str, base_dir: str, split: str) -> Iterator[bytes]:
        """The rows of a split, each JSON. Raises :class:`SourceError`."""
        ...

    def files_of(self, plugin: str, base_dir: str) -> list[str]:
        """The files that a plan pins, after the rows were read."""
        ...

    def package_of_source(self, plugin: str) -> Json | None:
        """The package of an installed one, as a plan pins it; None of others."""
        ...


@dataclass(frozen=True, slots=True)
class Source:
    """A source of rows. rename: from its fields to those of the configuration."""

    path: str
    name: str = ""
    subset: str = ""
    split: str = "train"
    weight: float | None = None
    revision: str = ""
    rename: Mapping[str, str] = field(default_factory=dict[str, str])
    booleans: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()

    @classmethod
    def of(cls, given: Json) -> Source:
        """The source of a request."""
        return cls(
            path=given["path"], name=given["name"], subset=given["subset"], split=given["split"], weight=given["weight"],
            revision=given["revision"], rename=given["rename"] or {}, booleans=tuple(given["booleans"] or ()),
            numbers=tuple(given["numbers"] or ()),
        )  # fmt: skip


@dataclass(slots=True)
class Opened:
    """A source that can be read. commit: of the hub. files, split: see :class:`files.Found`.
    plugins, base_dir: of a data source; its path starts there."""

    source: Source
    files: list[str]
    split: str
    commit: str = ""
    plugins: Plugins | None = None
    base_dir: str = ""

    def rows(self) -> Iterator[bytes]:
        """The rows, with renamed fields. Raises :class:`SourceError`."""
        if self.commit:
            rows = hub.rows(self.source.path, self.commit, self.source.subset, self.source.split)
            yield from self._shaped(rows, self.source.path, texts=False)
        if self.plugins is not None:
            rows = self.plugins.rows_of(self.source.path, self.base_dir, self.source.split)
            yield from self._shaped(rows, self.source.path, texts=False)
            self.files = self.plugins.files_of(self.source.path, self.base_dir)
            return
        for file in self.files:
            yield from self._shaped(read_file(file), file, texts=ending_of(file) in (".csv", ".tsv"))

    def _shaped(self, rows: Iterator[bytes], file: str, *, texts: bool) -> Iterator[bytes]:
        source = self.source
        if not source.rename and not texts:
            yield from rows
            return
        for number, row in enumerate(rows, 1):
            fields: Json = json.loads(row)
            for old in source.rename:
                if old not in fields:
                    names = ", ".join(f"`{name}`" for name in fields)
                    fix = f"set another field in [data.train_mix.{source.name}]; the row has {names}"
                    raise BadSource(f"row {number} of {file} has no `{old}`", fix=fix)
            fields |= {new: fields.pop(old) for old, new in source.rename.items()}
            if texts:
                fields |= _typed(fields, source)
            yield to_json(fields, f"row {number} of {file}")


def open_source(source: Source, base_dir: str, plugins: Plugins | None = None) -> Opened:
    """Find the files of a source, or the commit of a data set of the hub. Raises
    :class:`SourceError`."""
    if plugins is not None and plugins.is_plugin(source.path):
        return Opened(source, [], source.split, plugins=plugins, base_dir=base_dir or ".")
    path = os.path.join(base_dir, source.path)
    if not files.is_local(path) and hub.is_name(source.path, base_dir):
        return Opened(source, [], source.split, source.revision or hub.pin(source.path))
    found = files.find(path, source.split)
    return Opened(source, found.files, found.split)


def prepare(request: Json, plugins: Plugins | None = None) -> Json:
    """Write the rows of a request and describe them. plugins: the data sources; None: paths are
    files. Raises :class:`SourceRefused`."""
    sources = [Source.of(given) for given in request["sources"]]
    output = Path(request["output"])
    parts = [output.with_suffix(f".{number}") for number in range(len(sources))]
    opened: list[Opened] = []
    counted: list[int] = []
    try:
        for source, part in zip(sources, parts, strict=True):
            try:
                opened.append(open_source(source, request["base_dir"], plugins))
                counted.append(_write(opened[-1], part))
            except SourceError as error:
                raise SourceRefused(error, source.name) from error
        taken = counted
        if len(parts) == 1:
            parts[0].replace(output)
        else:
            taken = _mix(request, sources, counted, parts, output)
    finally:
        for part in parts:
            part.unlink(missing_ok=True)
    entries: list[Json] = [
        {
            "name": one.source.name, "path": hub.parts_of(one.source.path)[0] if one.commit else one.source.path,
            "revision": one.commit, "subset": one.source.subset, "split": one.split, "rows": have, "taken": count,
            "files": one.files,
        }
        for one, have, count in zip(opened, counted, taken, strict=True)
    ]  # fmt: skip
    if given := request.get("baseline"):
        entries.append(_compare(output, given, request["base_dir"]))
        taken = [entries[-1]["taken"]]
    packages = [found for one in opened if one.plugins and (found := one.plugins.package_of_source(one.source.path))]
    return {"rows": sum(taken), "sources": entries, "plugins": packages}


def _compare(output: Path, baseline: Json, base_dir: str) -> Json:
    """Give the rows of a file the completions of a baseline, and describe it. Raises
    :class:`SourceRefused`."""
    path = os.path.join(base_dir, baseline["path"])
    rows = output.read_bytes().splitlines()[: baseline["limit"] or None]
    try:
        joined = with_baseline(rows, path)
    except SourceError as error:
        raise SourceRefused(error, FIELD) from error
    output.write_bytes(b"".join(row + b"\n" for row in joined))
    return {
        "name": FIELD, "path": baseline["path"], "revision": "", "subset": "", "split": "", "rows": len(rows),
        "taken": len(rows), "files": [path],
    }  # fmt: skip


def _write(opened: Opened, output: Path) -> int:
    """Write the rows of a source to a file; returns how many. Raises :class:`BadSource` if it has
    none."""
    number = 0
    with output.open("wb") as file:
        for row in opened.rows():
            file.write(row + b"\n")
            number += 1
    if not number:
        raise BadSource(f"{opened.source.path} has no rows", fix="name another data set")
    return number


def _mix(request: Json, sources: list[Source], rows: list[int], parts: list[Path], output: Path) -> list[int]:
    """Write the rows of an epoch; returns how many come from each source."""
    weights = [source.weight for source in sources if source.weight is not None]
    taken = mixture.counts(rows, weights or None, request["until"])
    names = [source.name for source in sources]
    opened = [part.open("rb") for part in parts]
    try:
        offsets = [_offsets(file) for file in opened]
        with output.open("wb") as mixed:
            for source, row in mixture.order(names, rows, taken, request["seed"]):
                opened[source].seek(offsets[source][row])
                mixed.write(opened[source].readline())
    finally:
        for file in opened:
            file.close()
    return taken


def _offsets(file: Any) -> list[int]:
    """Where each line of a file begins."""
    offsets, at = list[int](), 0
    for line in file:
        offsets.append(at)
        at += len(line)
    return offsets


def _typed(fields: Json, source: Source) -> Json:
    """The values of typed fields of a row of texts; a text of another form stays."""
    booleans = {
        name: fields[name].lower() in ("true", "1")
        for name in source.booleans
        if fields.get(name, "").lower() in ("true", "false", "1", "0")
    }
    numbers: Json = {}
    for name in source.numbers:
        try:
            numbers[name] = float(fields[name])
        except (KeyError, ValueError):
            continue
    return booleans | numbers
