"""Publishes weights where the inference workers of this host read them."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from rollout.weights.v1 import weights_pb2 as pb
from rollout_workers.trainer import Trainer
from rollout_workers.weights import WeightsManifest, seal, stage_folder
from rollout_workers.weights.transfer.cache import ADAPTER_FILE
from rollout_workers.weights.transfer.catalog import Catalog
from rollout_workers.weights.transfer.publish_folder import PublishFolder, Superseded, versions
from rollout_workers.weights.transfer.shared_memory import SharedMemory

log = logging.getLogger(__name__)


class Publication:
    """The folder ``<run>/weights`` with one folder for each of the last two versions.

    A version is in shared memory, and its folder is a link to it. Versions that ``lasting``
    selects, and the last version of the run, are on disk, with a digest for each file. If the run
    trains adapters, a version contains only these. The folder belongs to the learner that started
    last; an older learner can't change it any more.
    """

    def __init__(
        self,
        run: str,
        run_directory: str,
        *,
        lasting: Callable[[int], bool],
        memory: SharedMemory,
        catalog: Catalog | None = None,
        incarnation: int = 0,
    ) -> None:
        """Take the folder over. lasting: whether the weights of a step must outlive the process.
        catalog: offers versions to workers without access to the folder. incarnation: of the run.
        Raises ``Superseded``, ``OSError``."""
        self._run, self._root = run, Path(run_directory) / "weights"
        self._place = PublishFolder(self._root, incarnation)
        self.catalog = catalog or Catalog()
        self._lasting, self._memory = lasting, memory
        self._newest: Path | None = None
        self._bytes = 0
        self._staging: Path | None = None  # for the next version
        self._whole = False

    @property
    def mine(self) -> bool:
        """Whether the folder still belongs to this learner."""
        return self._place.mine

    def publish(self, trainer: Trainer) -> pb.WeightsManifest:
        """Write the current weights and rename them into place; blocks.

        Not fsynced: the digest reveals damage after a power cut, and snapshots are durable. Raises
        ``Superseded``.
        """
        step = trainer.step
        folder = self._root / f"v{step:06d}"
        self._place.check()
        written = None if self._lasting(step) else self._write_to_memory(trainer, folder)
        if written is None:
            written = self._write(trainer, folder)
        self._newest = folder
        self.catalog.published(step, written.digest, folder)
        return self._manifest(folder, written)

    def _write(self, trainer: Trainer, folder: Path) -> WeightsManifest:
        """Write the weights to the run's folder."""
        staging = self._place.staging(folder.name)
        try:
            written = trainer.write_adapter(staging) if self._adapters(trainer) else trainer.write_weights(staging, fsync=False)
            if self._lasting(trainer.step):
                seal(staging)
        except FileNotFoundError:
            self._place.check()  # a newer learner removed the staging folder
            raise
        self._place.put(staging, folder.name)
        return written

    def _write_to_memory(self, trainer: Trainer, folder: Path) -> WeightsManifest | None:
        """Write the weights to shared memory; None if they do not fit."""
        memory = self._memory.folder
        if memory is None or not self._memory.fits(self._size(trainer)):
            return None
        target = memory / folder.name
        staging, self._staging = self._staging, None
        try:
            if self._adapters(trainer):
                written = trainer.write_adapter(target)
            else:
                written = trainer.write_weights(target, fsync=False, staging=staging)
        except OSError as error:  # another process used the memory
            log.warning("cannot write weights to %s (%s); writing them to the run's folder", memory, error)
            return None
        fresh = self._place.staging(folder.name)
        fresh.symlink_to(target)
        self._place.put(fresh, folder.name)
        return written

    def prepare(self, trainer: Trainer) -> None:
        """Remove old versions and reserve memory for the next one; blocks."""
        self._prune(trainer.step)
        memory = self._memory.folder
        if self._adapters(trainer):
            return
        if self._staging is None and memory is not None and self._bytes and self._memory.fits(self._bytes):
            with contextlib.suppress(OSError):
                self._staging = stage_folder(memory, trainer.config_folder, self._bytes)

    def make_whole(self, trainer: Trainer) -> None:
        """Publish whole weights instead of adapters from now on. Publishes the newest version again
        if the trainer is still at it.

        Called if a worker computed another digest from the adapters.
        """
        if self._adapters(trainer):
            self._whole = True
            if self._newest is not None and self._newest.name == f"v{trainer.step:06d}":
                self.publish(trainer)

    def _adapters(self, trainer: Trainer) -> bool:
        """Whether versions contain only adapters."""
        return trainer.adapts and not self._whole

    def close(self) -> None:
        """Copy the newest version from memory to disk, and free the memory.

        If another learner has taken the folder over, the memory stays until that learner has
        replaced its links.
        """
        newest = self._newest
        try:
            if newest is not None and self._mine(newest):
                source, staging = newest.resolve(), self._place.staging(newest.name)
                if source.is_dir():
                    shutil.copytree(source, staging)
                    seal(staging)
                    self._place.put(staging, newest.name)
            self._discard(self._mine)  # before freeing the memory to which they link
            self._place.check()
        except (Superseded, FileNotFoundError) as error:
            log.warning("%s keeps the published versions: %s", self._root, error)
            self._memory.leave()
            return
        self._memory.close()
        with contextlib.suppress(Superseded):  # links into the memory of dead processes
            self._discard(lambda path: path.is_symlink() and not path.exists())

    def _discard(self, wanted: Callable[[Path], bool]) -> None:
        """Remove the versions that ``wanted`` selects. Raises ``Superseded``."""
        for _, path in versions(self._root):
            if wanted(path):
                self._place.discard(path.name)

    def _mine(self, path: Path) -> bool:
        """Whether a version is a link into this process's memory."""
        memory = self._memory.folder
        return memory is not None and path.is_symlink() and path.resolve().parent == memory.resolve()

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
            form=pb.WEIGHTS_FORM_ADAPTER if (folder / ADAPTER_FILE).is_file() else pb.WEIGHTS_FORM_WHOLE,
        )

    def _size(self, trainer: Trainer) -> int:
        self._bytes = self._bytes or sum(tensor.nbytes for _, tensor in trainer.named_weights())
        return self._bytes

    def _prune(self, current: int) -> None:
        """Remove versions older than the one before ``current``. Newer ones stay, because workers
        may still use them."""
        self._place.check()
        older = sorted((version, path) for version, path in versions(self._root) if version < current)
        for _, path in older[:-1]:
            self._place.discard(path.name)
