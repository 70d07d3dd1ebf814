"""Finds the files of a local source: a file, a glob, a folder, or a folder of ``save_to_disk``."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from rollout.source.errors import BadSource, MissingFile
from rollout.source.formats import ENDINGS, ending_of

_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""The words of a file's path that name its split, as in data sets of the hub."""


@dataclass(frozen=True, slots=True)
class Found:
    """The files of a source, sorted by name, and the split that they are; "" without splits."""

    files: list[str]
    split: str = ""


def is_local(path: str) -> bool:
    """Whether a path names files here: it exists or is a glob."""
    return Path(path).exists() or has_magic(path)


def find(path: str, split: str) -> Found:
    """The files of a source. split: of a folder that has splits. Raises :class:`MissingFile`,
    :class:`BadSource`."""
    place = Path(path)
    if place.is_dir():
        return _saved(place, split) or _folder(place, split)
    if place.exists():
        return Found([path])
    if has_magic(path):
        files = sorted(file for file in glob(path, recursive=True) if Path(file).is_file())
        if not files:
            raise MissingFile(f"no file matches {path}", fix="correct the pattern; `**` matches folders")
        return Found(files)
    raise MissingFile(f"{path} does not exist", fix="correct the path")


def _saved(folder: Path, split: str) -> Found | None:
    """The files of ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk``."""
    splits = folder / "dataset_dict.json"
    if splits.exists():
        names: list[str] = json.loads(splits.read_bytes())["splits"]
        if split not in names:
            raise _no_split(folder, split, names)
        found = _saved(folder / split, "")
        if found is None:
            raise MissingFile(f"{folder / split} has no state.json", fix="save the data set again with `save_to_disk`")
        return Found(found.files, split)
    state = folder / "state.json"
    if not state.exists():
        return None
    entries: list[dict[str, Any]] = json.loads(state.read_bytes()).get("_data_files") or []
    return Found([str(folder / entry["filename"]) for entry in entries])


def _folder(folder: Path, split: str) -> Found:
    within = {
        str(file): str(file.relative_to(folder))
        for file in sorted(folder.rglob("*"))
        if file.is_file() and ending_of(file.name) and not any(part[0] in "._" for part in file.relative_to(folder).parts)
    }
    if not within:
        raise MissingFile(f"the folder {folder} has no data files", fix=f"add files that end in {', '.join(ENDINGS)}")
    splits = {name for path in within.values() if (name := _split_of(path))}
    files = list(within)
    if splits:
        files = [file for file, path in within.items() if _split_of(path) == split]
        if not files:
            raise _no_split(folder, split, sorted(splits))
    endings = sorted({ending_of(file) for file in files})
    if len(endings) > 1:
        fix = f"name one of them with a glob, such as {folder}/*{endings[0]}"
        raise BadSource(f"the folder {folder} has files of several formats: {', '.join(endings)}", fix=fix)
    return Found(files, split if splits else "")


def _split_of(path: str) -> str:
    """The split that a file's name names, otherwise its nearest folder; "" without one."""
    for part in reversed(Path(path.lower()).parts):
        words = re.split(r"[^a-z]+", part)
        for name, keywords in _SPLITS.items():
            if any(word in keywords for word in words):
                return name
    return ""


def _no_split(folder: Path, split: str, names: list[str]) -> BadSource:
    choices = ", ".join(f'"{name}"' for name in names)
    return BadSource(f"the folder {folder} has no split `{split}`", fix=f"set the split in [data] to {choices}")
