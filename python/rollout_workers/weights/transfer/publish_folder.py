"""Whose place a folder of published versions is, and how something is put into it.

A learner may stand still anywhere and wake up when another one has long taken its place. To look whose a folder is and to rename
something into it are two steps, so two rules together keep its hands off what its successor published:

1. Whoever publishes first lays what it made beside the place, under a name that ends in ``.tmp``, then looks whether the place is
   still its own, then renames.
2. Whoever takes the place says so first, and then removes every such thing that lies there.

What was laid out before 2 is gone when it is to be renamed; what is laid out after 2 is followed by a look, which finds the
successor. To remove a version is to put an empty folder in its place, by the same rules, and to remove that: only an empty folder
can be removed so, and no version is one.
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
_AT_FDCWD = -100
_EXCHANGE = 2  # RENAME_EXCHANGE
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}
_TAKEN = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR}

Claim = tuple[int, int]  # incarnation of the run, how many claimed in it; the highest is in force


class Superseded(RolloutError):
    """Another process has taken the place of this one, and publishes there."""

    reason: ClassVar[str] = "LEARNER_SUPERSEDED"


class PublishFolder:
    """A folder into which the process that claimed it last publishes. A claim is a file, ``.owner-<incarnation>-<count>``."""

    def __init__(self, root: Path, incarnation: int) -> None:
        """Claim ``root``, which need not be there. Raises :class:`Superseded` where a later incarnation did, ``OSError``."""
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        self._claim = self._take(incarnation)
        for path in [*root.glob(".*.tmp"), *root.glob(".*.old")]:
            gone = root / f".{uuid.uuid4().hex}.gone"
            try:
                path.rename(gone)
            except FileNotFoundError:
                continue  # renamed by its owner a moment before
            remove(gone)
        for path, claim in self._claims():
            if claim < self._claim:
                path.unlink(missing_ok=True)

    def check(self) -> None:
        """Raise :class:`Superseded` unless the place is still this process's."""
        newest = max((claim for _, claim in self._claims()), default=self._claim)
        if newest > self._claim:
            theirs, ours = (f"{incarnation}.{count}" for incarnation, count in (newest, self._claim))
            raise Superseded(f"another learner publishes in {self.root} (claim {theirs}, this one's is {ours})")

    @property
    def mine(self) -> bool:
        """Whether the place is still this process's."""
        try:
            self.check()
        except Superseded:
            return False
        return True

    def staging(self, name: str) -> Path:
        """Where what is to be called ``name`` is laid out; nothing is there yet."""
        return self.root / f".{name}.{uuid.uuid4().hex}.tmp"

    def put(self, staging: Path, name: str) -> None:
        """Rename what is laid out at ``staging``, a folder or a link, to ``name`` and remove what had that name. Raises
        :class:`Superseded`; then nothing has changed but that ``staging`` is gone."""
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
        """Remove what is called ``name``, and what it leads to where it is a link; nothing happens where there is none. Raises
        :class:`Superseded`; then nothing has changed."""
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
        with contextlib.suppress(OSError):  # a successor has published there meanwhile
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
                continue  # another process starts at this moment
            return claim

    def _claims(self) -> list[tuple[Path, Claim]]:
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return []
        found = ((name, _OWNER.fullmatch(name)) for name in names)
        return [(self.root / name, (int(match[1]), int(match[2]))) for name, match in found if match]


def replace(staging: Path, target: Path) -> None:
    """Rename a folder or a link over another of either kind, and remove that. Where the file system can exchange names, one of
    the two is there at every moment. Raises ``FileNotFoundError`` where ``staging`` is not there; then ``target`` stays."""
    while True:
        try:
            _swap(staging, target)
        except FileNotFoundError:
            try:
                staging.rename(target)
            except OSError as error:
                if error.errno in _TAKEN and os.path.lexists(staging):
                    continue  # it was made in between
                raise
            return
        remove(staging)  # what was there before
        return


def remove(path: Path) -> None:
    """Remove a folder with all in it, or a link alone."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _swap(staging: Path, target: Path) -> None:
    """Exchange the names of two folders or links. Raises ``FileNotFoundError`` where one of them is not there; then nothing has
    changed."""
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
    """Where names can't be exchanged, as on NFS: what is there steps aside first, and back where nothing follows."""
    old = target.parent / f".{target.name}.{uuid.uuid4().hex}.old"
    target.rename(old)
    try:
        staging.rename(target)
    except FileNotFoundError:
        if not os.path.lexists(target):
            old.rename(target)
        raise
    with contextlib.suppress(FileNotFoundError):  # a successor has removed it
        old.rename(staging)
