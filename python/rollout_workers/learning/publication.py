"""Weights where the inference workers of this host read them."""

from __future__ import annotations

import logging
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from rollout.weights.v1 import weights_pb2 as pb
from rollout_workers.learner import Trainer
from rollout_workers.learning.shelf import Shelf
from rollout_workers.weights import WeightsManifest

log = logging.getLogger(__name__)

_FOLDER = re.compile(r"v(\d+)")


class Publication:
    """The folder ``<run>/weights``: one folder a version, of which the last two stay.

    A version that is only passed on lies in memory, and its folder is a link to there; the version that a run ends with, and
    those that ``lasting`` names, are written here.
    """

    def __init__(self, run: str, run_directory: str, *, lasting: Callable[[int], bool], shelf: Shelf) -> None:
        """lasting: whether the weights of a step must outlive the process."""
        self._run, self._root = run, Path(run_directory) / "weights"
        self._lasting, self._shelf = lasting, shelf
        self._newest: Path | None = None
        self._bytes = 0

    def publish(self, trainer: Trainer) -> pb.WeightsManifest:
        """Write the weights as they stand, complete and renamed into place; blocks.

        Not fsynced: after a power cut the digest tells, and a snapshot brings them back.
        """
        step = trainer.step
        folder = self._root / f"v{step:06d}"
        self._root.mkdir(parents=True, exist_ok=True)
        written = None if self._lasting(step) else self._shelve(trainer, folder)
        if written is None:
            if folder.is_symlink():
                folder.unlink()
            written = trainer.write_weights(folder, fsync=False)
        self._newest = folder
        self._prune(step)
        return self._manifest(folder, written)

    def _shelve(self, trainer: Trainer, folder: Path) -> WeightsManifest | None:
        """Write the weights into memory, where they fit."""
        shelf = self._shelf.folder
        if shelf is None or not self._shelf.fits(self._size(trainer)):
            return None
        held = shelf / folder.name
        try:
            written = trainer.write_weights(held, fsync=False)
        except OSError as error:  # somebody else took the room
            log.warning("%s takes no weights (%s); they go to the run's folder", shelf, error)
            return None
        _point(folder, held)
        return written

    def close(self) -> None:
        """Bring the newest version out of memory, and give the memory back."""
        newest = self._newest
        if newest is not None and newest.is_symlink():
            held, staging = newest.resolve(), newest.parent / f".{newest.name}.{uuid.uuid4().hex}.tmp"
            if held.is_dir():
                shutil.copytree(held, staging)
                newest.unlink()
                staging.rename(newest)
        for path, _ in self._versions():
            if path.is_symlink():
                path.unlink()
        self._shelf.close()

    def _manifest(self, folder: Path, written: WeightsManifest) -> pb.WeightsManifest:
        return pb.WeightsManifest(
            run_id=self._run,
            version=written.version,
            digest=written.digest,
            tensors=[pb.Tensor(name=t.name, dtype=t.dtype, shape=t.shape, digest=t.digest) for t in written.tensors],
            files=[pb.WeightsFile(name=file.path, bytes=file.bytes) for file in written.files],
            directory=str(folder.absolute()),
            dtype=written.tensors[0].dtype if written.tensors else "",
            bytes=sum(file.bytes for file in written.files if file.path.endswith(".safetensors")),
        )

    def _size(self, trainer: Trainer) -> int:
        self._bytes = self._bytes or sum(tensor.nbytes for _, tensor in trainer.named_weights())
        return self._bytes

    def _prune(self, current: int) -> None:
        """Remove what is older than the version before ``current``. Newer ones stay: the mesh may serve them yet."""
        older = sorted((version, path) for path, version in self._versions() if version < current)
        for _, path in older[:-1]:
            if path.is_symlink():
                shutil.rmtree(path.resolve(), ignore_errors=True)
                path.unlink()
            else:
                shutil.rmtree(path, ignore_errors=True)

    def _versions(self) -> list[tuple[Path, int]]:
        if not self._root.is_dir():
            return []
        return [(path, int(match[1])) for path in self._root.iterdir() if (match := _FOLDER.fullmatch(path.name))]


def _point(link: Path, target: Path) -> None:
    """Make ``link`` lead to ``target``, in place of a link or a folder that was there."""
    fresh = link.parent / f".{link.name}.{uuid.uuid4().hex}.tmp"
    fresh.symlink_to(target)
    if link.is_dir() and not link.is_symlink():
        shutil.rmtree(link)
    fresh.rename(link)
