"""The folder of published versions, which only its current owner can change.

A learner process may pause at any point and resume after another one has replaced it. Checking the
owner and renaming are two steps, so two rules prevent an old owner from changing what its successor
published:

1. To publish: write to a staging name that ends in ``.tmp``, then check the owner, then rename.
2. To take over: record the claim first, then remove every staging folder.

A staging folder from before step 2 is gone when it is renamed; one from after step 2 is followed by
a check, which finds the successor. To remove a version, an empty folder replaces it by the same
rules and is then removed with ``rmdir``, which cannot remove a version.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
import uuid
from functools import cache
from pathlib import Path
from typing import ClassVar

from rollout.errors import RolloutError

_OWNER = re.compile(r"\.owner-(\d+)-(\d+)")
_VERSION = re.compile(r"v(\d+)")
_AT_FDCWD = -100
_EXCHANGE = 2  # RENAME_EXCHANGE
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}
_TAKEN = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR}

Claim = tuple[int, int]  # incarnation of the run, number of the claim in it; the highest is the owner


def versions(root: Path) -> list[tuple[int, Path]]:
    """The numbers and folders of the versions in a folder, in any order. One may be a link to
    memory that was freed."""
    if not root.is_dir():
        return []
    return [(int(match[1]), path) for path in root.iterdir() if (match := _VERSION.fullmatch(path.name))]


class Superseded(RolloutError):
    """Another process has replaced this one and owns the folder."""

    reason: ClassVar[str] = "LEARNER_SUPERSEDED"


class PublishFolder:
    """A folder that belongs to the process that claimed it last. A claim is a file,
    ``.owner-<incarnation>-<count>``."""

    def __init__(self, root: Path, incarnation: int) -> None:
        """Claim ``root``, which is created if missing. Raises :class:`Superseded` if a later
        incarnation owns it, ``OSError``."""
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        self._claim = self._take(incarnation)
        for path in [*root.glob(".*.tmp"), *root.glob(".*.old")]:
            gone = root / f".{uuid.uuid4().hex}.gone"
            try:
                path.rename(gone)
            except FileNotFoundError:
                continue  # its owner has just renamed it
            remove(gone)
        for path, claim in self._claims():
            if claim < self._claim:
                path.unlink(missing_ok=True)

    def check(self) -> None:
        """Raise :class:`Superseded` unless this process owns the folder."""
        newest = max((claim for _, claim in self._claims()), default=self._claim)
        if newest > self._claim:
            theirs, ours = (f"{incarnation}.{count}" for incarnation, count in (newest, self._claim))
            raise Superseded(f"another learner publishes in {self.root} (claim {theirs}, this one's is {ours})")

    @property
    def mine(self) -> bool:
        """Whether this process owns the folder."""
        try:
            self.check()
        except Superseded:
            return False
        return True

    def staging(self, name: str) -> Path:
        """A new staging path for ``name``."""
        return self.root / f".{name}.{uuid.uuid4().hex}.tmp"

    def put(self, staging: Path, name: str) -> None:
        """Rename ``staging``, a folder or a link, to ``name``, replacing what had that name.

        Raises :class:`Superseded` after removing ``staging``; nothing else has changed then.
        """
        try:
            self.check()
            replace(staging, self.root / name)
        except FileNotFoundError:
            self.check()
            raise
        except Superseded:
            remove(staging)
            raise

    def discard(self, name: str) -> None:
        """Remove ``name`` and the target of a link, if it exists. Raises :class:`Superseded`
        without changing anything."""
        aside = self.staging(name)
        aside.mkdir()
        try:
            self.check()
            _swap(aside, self.root / name)
        except FileNotFoundError:
            remove(aside)
            self.check()
            return
        except Superseded:
            remove(aside)
            raise
        if aside.is_symlink():
            shutil.rmtree(aside.resolve(), ignore_errors=True)
        remove(aside)
        with contextlib.suppress(OSError):  # a successor has published under this name
            (self.root / name).rmdir()

    def _take(self, incarnation: int) -> Claim:
        while True:
            newest = max((claim for _, claim in self._claims()), default=(0, 0))
            if newest[0] > incarnation:
                raise Superseded(f"incarnation {newest[0]} of the run publishes in {self.root}; this is {incarnation}")
            claim = (incarnation, newest[1] + 1 if newest[0] == incarnation else 1)
            try:
                os.close(os.open(self.root / f".owner-{claim[0]}-{claim[1]}", os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            except FileExistsError:
                continue  # another process claimed it at the same time
            return claim

    def _claims(self) -> list[tuple[Path, Claim]]:
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return []
        found = ((name, _OWNER.fullmatch(name)) for name in names)
        return [(self.root / name, (int(match[1]), int(match[2]))) for name, match in found if match]


def replace(staging: Path, target: Path) -> None:
    """Rename a folder or a link over another, and remove the latter.

    If the file system can exchange names, ``target`` exists at every moment. Raises
    ``FileNotFoundError`` if ``staging`` is missing; ``target`` stays then.
    """
    while True:
        try:
            _swap(staging, target)
        except FileNotFoundError:
            try:
                staging.rename(target)
            except OSError as error:
                if error.errno in _TAKEN and os.path.lexists(staging):
                    continue  # created since the exchange failed
                raise
            return
        remove(staging)  # the previous target
        return


def remove(path: Path) -> None:
    """Remove a folder recursively, or a link without its target."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _swap(staging: Path, target: Path) -> None:
    """Exchange the names of two folders or links. Raises ``FileNotFoundError``, without changes, if
    one is missing."""
    try:
        _exchange(staging, target)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        _step_aside(staging, target)


def _exchange(one: Path, other: Path) -> None:
    libc = _libc()
    if not hasattr(libc, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(one), None, str(other))


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _step_aside(staging: Path, target: Path) -> None:
    """Replace ``target`` without an exchange, as on NFS: move it aside first, and back if
    ``staging`` is missing."""
    old = target.parent / f".{target.name}.{uuid.uuid4().hex}.old"
    target.rename(old)
    try:
        staging.rename(target)
    except FileNotFoundError:
        if not os.path.lexists(target):
            old.rename(target)
        raise
    with contextlib.suppress(FileNotFoundError):  # a successor removed it
        old.rename(staging)
