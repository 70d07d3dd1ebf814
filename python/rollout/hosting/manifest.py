"""Manifests of sidecars: which program serves a plugin, or at which address it is served.

A configuration names ``plugin.toml:NAME``::

    name = "word_count"
    version = "1.0.0"
    kind = "reward"
    command = ["./word_count"]      # started and supervised by each worker
    # address = "unix:/run/word_count.sock", or "host:port" with [tls]: started by someone else

Paths start at the folder of the manifest.
"""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

from rollout.errors import Place, RolloutError

KINDS = ("reward", "environment", "tool", "evaluation", "data_source")
IN_PROCESS = ("advantage", "loss")
"""Kinds that compute with tensors of the learner."""
MEMORY_BYTES = 2 << 30
"""Memory of a sidecar's process after which it is replaced, without ``memory_bytes``."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
_VERSION = re.compile(r"[0-9]+(\.[0-9]+){0,3}[A-Za-z0-9.+-]*")
_KEYS = ("name", "version", "kind", "protocol", "command", "address", "files", "memory_bytes", "start_seconds", "tls")
_TLS = ("ca", "cert", "key")
_LOCAL = ("127.0.0.1", "localhost", "[::1]")


class ManifestError(RolloutError):
    """A manifest that can't be read, or that states something wrong."""

    reason: ClassVar[str] = "PLUGIN_MANIFEST"


@dataclass(frozen=True, slots=True)
class Tls:
    """Files of mutual TLS, in PEM. ca: who signed the certificate of the sidecar. cert and key: of
    the worker."""

    ca: Path
    cert: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Manifest:
    """A sidecar's plugin. Exactly one of ``command`` and ``address`` is set.

    files: the manifest and the files that the plan pins with it: of the command, and those that
    ``files`` names. memory_bytes: of its process, after which it is replaced. start_seconds: until
    it must serve.
    """

    path: Path
    name: str
    version: str
    kind: str
    command: tuple[str, ...]
    address: str
    tls: Tls | None
    files: tuple[Path, ...]
    memory_bytes: int
    start_seconds: float


def is_manifest(plugin: str) -> bool:
    """Whether a plugin is named by its manifest, ``plugin.toml:NAME``."""
    return plugin.rpartition(":")[0].endswith(".toml")


def read_manifest(plugin: str, base_dir: str | os.PathLike[str] = ".", *, kind: str = "") -> Manifest:
    """Read ``plugin.toml:NAME`` relative to ``base_dir``. kind: that it must have; any without it.
    Raises ``ManifestError`` with the line."""
    file, colon, name = plugin.rpartition(":")
    if not colon or not file.endswith(".toml"):
        raise ManifestError(f"`{plugin}` names no manifest", fix="write it as `plugin.toml:NAME`")
    path = Path(os.path.abspath(os.path.join(base_dir, file)))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ManifestError(f"can't read {file}: {why}", fix="correct the path", place=Place(str(path))) from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = int(found[1]) if (found := re.search(r"line (\d+)", str(error))) else 0
        raise ManifestError(f"{file} is not TOML: {error}", fix="correct the line", place=_place(path, text, line)) from error
    return _Reader(path, text, values, file).manifest(name, kind)


@dataclass(frozen=True, slots=True)
class _Reader:
    path: Path
    text: str
    values: dict[str, Any]
    shown: str

    def manifest(self, name: str, kind: str) -> Manifest:
        for key in self.values:
            if key not in _KEYS:
                raise self._wrong(key, f"`{key}` is unknown", f"the keys of a manifest are: {', '.join(_KEYS)}")
        stated = self._text("name", 'write `name = "word_count"`')
        if not _NAME.fullmatch(stated):
            raise self._wrong(
                "name", f"the name {stated!r} is not an identifier", "use letters, digits, and underscores, at most 63"
            )
        if stated != name:
            raise self._wrong(
                "name", f"{self.shown} is the manifest of `{stated}`, not of `{name}`", f"write `{self.shown}:{stated}`"
            )
        version = self._text("version", 'write `version = "1.0.0"`')
        if not _VERSION.fullmatch(version):
            raise self._wrong("version", f"the version {version!r} does not begin with numbers", 'write it like "1.0.0"')
        stated_kind = self._text("kind", f"write one of: {', '.join(KINDS)}")
        if stated_kind in IN_PROCESS:
            raise self._wrong(
                "kind",
                f"a plugin of the kind {stated_kind} works in process only, so it can't be a sidecar",
                f"write it in Python, and add the entry point `{stated_kind}.{stated}` to its package",
            )
        if stated_kind not in KINDS:
            raise self._wrong("kind", f"the kind {stated_kind!r} is unknown", f"write one of: {', '.join(KINDS)}")
        if kind and stated_kind != kind:
            raise self._wrong(
                "kind",
                f"`{name}` is of the kind {stated_kind}, but the configuration uses it as {kind}",
                "name it where it belongs",
            )
        protocol: Any = self.values.get("protocol", 1)
        if type(protocol) is not int or protocol != 1:
            fix = "write `protocol = 1`, or update rollout"
            raise self._wrong("protocol", f"the plugin needs version {protocol} of rollout.plugin.v1, this rollout speaks 1", fix)
        command, address = self._command(), str(self.values.get("address", ""))
        if bool(command) == bool(address):
            which = "both `command` and `address`" if command else "neither `command` nor `address`"
            raise self._wrong("address", f"{self.shown} has {which}", "write one: the program to start, or where it is served")
        return Manifest(
            path=self.path,
            name=name,
            version=version,
            kind=stated_kind,
            command=command,
            address=address,
            tls=self._tls(address),
            files=self._files(command),
            memory_bytes=int(self._number("memory_bytes", MEMORY_BYTES, 1 << 24)),
            start_seconds=self._number("start_seconds", 120.0, 0.1),
        )

    def _text(self, key: str, fix: str) -> str:
        value = self.values.get(key)
        if not isinstance(value, str) or not value:
            what = f"`{key}` is missing" if value is None else f"`{key}` is {value!r}, not a text"
            raise self._wrong(key, f"{self.shown}: {what}", fix)
        return value

    def _number(self, key: str, otherwise: float, least: float) -> float:
        value = self.values.get(key, otherwise)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value >= least:
            raise self._wrong(key, f"`{key}` is {value!r}", f"write a number of at least {least:g}")
        return value

    def _texts(self, key: str, example: str) -> list[str]:
        value: Any = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(each, str) and each for each in cast("list[Any]", value)):
            raise self._wrong(key, f"`{key}` is not a list of texts", f"write for example `{key} = {example}`")
        return cast("list[str]", value)

    def _command(self) -> tuple[str, ...]:
        command = self._texts("command", '["./word_count"]')
        if not command:
            return ()
        program = command[0]
        if "/" in program:
            found = self.path.parent / program
            if not found.is_file() or not os.access(found, os.X_OK):
                fix = f"build it, or correct the path, which starts at {self.path.parent}"
                raise self._wrong("command", f"the program {program} does not exist or can't be executed", fix)
            program = str(found)
        elif shutil.which(program) is None:
            raise self._wrong("command", f"the program `{program}` is not on PATH", "install it, or write its path with a slash")
        return (program, *command[1:])

    def _files(self, command: tuple[str, ...]) -> tuple[Path, ...]:
        """The manifest, the files of the command, and the named ones."""
        folder = self.path.parent
        found = {self.path}
        found |= {path for each in command if (path := folder / each).is_file() and path.is_relative_to(folder)}
        for pattern in self._texts("files", '["src/*.go"]'):
            try:
                matches = {path for path in folder.glob(pattern) if path.is_file()}
            except (ValueError, NotImplementedError) as error:
                raise self._wrong("files", f"`files` has {pattern!r}: {error}", "name files relative to the manifest") from error
            if not matches:
                raise self._wrong("files", f"`files` has {pattern!r}, and no file matches it", "correct or remove it")
            found |= matches
        return tuple(sorted(found))

    def _tls(self, address: str) -> Tls | None:
        table: Any = self.values.get("tls")
        if table is None:
            if address and not address.startswith("unix:") and address.rpartition(":")[0] not in _LOCAL:
                raise self._wrong(
                    "address", f"{address} is on another host, and there is no [tls]", "add [tls] with `ca`, `cert`, and `key`"
                )
            return None
        if not address or address.startswith("unix:"):
            raise self._wrong("tls", "[tls] is only for an `address` with host and port", "remove it")
        entries = cast("dict[str, Any]", table) if isinstance(table, dict) else {}
        if set(entries) != set(_TLS) or not all(isinstance(each, str) for each in entries.values()):
            raise self._wrong("tls", "[tls] does not have exactly `ca`, `cert`, and `key`", "name the three files")
        paths = {key: self.path.parent / entries[key] for key in _TLS}
        for key, path in paths.items():
            if not path.is_file():
                raise self._wrong(key, f"the file {entries[key]} of `tls.{key}` does not exist", "correct the path")
        return Tls(**paths)

    def _wrong(self, key: str, message: str, fix: str) -> ManifestError:
        lines = self.text.split("\n")
        pattern = re.compile(rf"\s*(\[{re.escape(key)}\]|{re.escape(key)}\s*=)")
        line = next((number for number, each in enumerate(lines, 1) if pattern.match(each)), 0)
        return ManifestError(message, fix=fix, place=_place(self.path, self.text, line))


def _place(path: Path, text: str, line: int) -> Place:
    lines = text.split("\n")
    if not 0 < line <= len(lines):
        return Place(str(path))
    return Place(str(path), line, 1, lines[line - 1])
