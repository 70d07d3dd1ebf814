"""The versions that an inference worker received over the network, as folders that its engine can
load."""

from __future__ import annotations

import asyncio
import errno
import logging
import mmap
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from rollout.weights.v1 import weights_pb2 as pb
from rollout_workers.weights.transfer import patch
from rollout_workers.weights.transfer.errors import BaseMissing, TransferCorrupt, VersionNotFound
from rollout_workers.weights.transfer.layout import read_layout
from rollout_workers.weights.transfer.shared_memory import SharedMemory

log = logging.getLogger(__name__)

TENSOR_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
_KEPT = 2  # versions: the newest one, and its predecessor as the base of patches
_PATCHES = 4


class Fetches(Protocol):
    """Downloads the bytes of an offer to a file."""

    async def fetch(self, offer: pb.WeightsOffer, path: Path) -> None: ...


class WeightsCache:
    """The cache of one inference worker. It does not verify versions: the engine compares the
    digest of what it loads."""

    def __init__(
        self, run: str, run_directory: str, worker: str, fetcher: Fetches, memory: Callable[[str], SharedMemory] = SharedMemory
    ) -> None:
        """Versions are in shared memory if there is enough, else below ``run_directory``."""
        self._run, self._fetcher, self._make_memory = run, fetcher, memory
        self._own = Path(run_directory) / "received" / worker
        self._memory: SharedMemory | None = None
        self._root: Path | None = None
        self._files: dict[str, Path] = {}  # the file of each version by digest, the newest last
        self._patches: dict[tuple[str, str], bytes] = {}  # by base and digest
        self._loaded = ("", Path())  # digest and folder of what the engine loaded from this host
        self._lock = asyncio.Lock()

    async def bring(self, offers: Sequence[pb.WeightsOffer]) -> str:
        """Fetch the versions of the offers, and return the folder of the last one.

        If it is interrupted, the next call resumes the partial transfer. Raises
        :class:`BaseMissing`, ``SourcesLost``, ``PatchCorrupt``, :class:`TransferCorrupt`,
        ``OSError``.
        """
        async with self._lock:
            wanted = offers[-1].digest
            if wanted not in self._files:
                first = offers[0]
                if first.form == pb.WEIGHTS_FORM_PATCH and first.base_digest not in self._files:
                    raise BaseMissing(
                        f"the base of the patch, version {first.base_version} ({first.base_digest}), is not in the cache",
                        fix="send the whole version",
                    )
                root = await asyncio.to_thread(self._room, max(offer.bytes for offer in offers))
                try:
                    for offer in offers:
                        await self._take(root, offer)
                    await asyncio.to_thread(self._prune, root)
                except OSError as error:
                    if error.errno == errno.ENOSPC and root != self._own:
                        log.warning("%s is full; writing weights to %s from now on", root, self._own)
                        self._root = self._own
                    raise
            return str(self._files[wanted].parent)

    async def _take(self, root: Path, offer: pb.WeightsOffer) -> None:
        if offer.digest in self._files:
            return
        incoming = root / f"incoming-{_form(offer)}-{offer.base_digest[7:23]}-{offer.digest[7:]}"
        await self._fetcher.fetch(offer, incoming)
        self._files[offer.digest] = await asyncio.to_thread(self._unpack, root, offer, incoming)

    async def discard(self, digest: str) -> None:
        """Remove all versions if ``digest`` is one of them: its content did not match, and others
        may derive from it."""
        async with self._lock:
            if digest in self._files:
                for path in self._files.values():
                    await asyncio.to_thread(shutil.rmtree, path.parent, True)
                self._files.clear()
                self._patches.clear()

    def note(self, digest: str, directory: str) -> None:
        """Record a version that the engine loaded from a folder of this host, so that other workers
        can get it from here."""
        if all(str(path.parent) != directory for path in self._files.values()):
            self._loaded = (digest, Path(directory))

    def find(self, digest: str, form: int, base_digest: str) -> memoryview:
        """The bytes of a version for another worker. Raises :class:`VersionNotFound`."""
        try:
            if form == pb.WEIGHTS_FORM_PATCH:
                return memoryview(self._patches[base_digest, digest])
            path = self._files.get(digest)
            if path is None and digest == self._loaded[0]:
                path = self._loaded[1] / (ADAPTER_FILE if form == pb.WEIGHTS_FORM_ADAPTER else TENSOR_FILE)
            if path is not None and (path.name == ADAPTER_FILE) == (form == pb.WEIGHTS_FORM_ADAPTER):
                return mapped(path)
        except (KeyError, OSError):
            pass
        raise VersionNotFound(f"this worker does not have {digest} as {pb.WeightsForm.Name(pb.WeightsForm.ValueType(form))}")

    def close(self) -> None:
        """Remove all versions."""
        self._files.clear()
        if self._memory is not None:
            self._memory.close()
        shutil.rmtree(self._own, ignore_errors=True)

    def _room(self, size: int) -> Path:
        """A folder with space for versions of ``size`` bytes."""
        if self._root is None:
            self._memory = self._make_memory(self._run)
            self._root = self._memory.folder if self._memory.fits(size) else self._own
            assert self._root is not None
            shutil.rmtree(self._own, ignore_errors=True)  # from a process that was killed
        self._root.mkdir(parents=True, exist_ok=True)
        return self._root

    def _unpack(self, root: Path, offer: pb.WeightsOffer, incoming: Path) -> Path:
        """The file of a received version. Removes ``incoming``, also if it is invalid."""
        name = ADAPTER_FILE if offer.form == pb.WEIGHTS_FORM_ADAPTER else TENSOR_FILE
        folder = root / f"v{offer.version:06d}-{offer.digest[7:23]}"
        staging = root / f".{folder.name}"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        try:
            if offer.form == pb.WEIGHTS_FORM_PATCH:
                self._apply(offer, incoming, staging / name)
            else:
                _check(incoming)
                incoming.rename(staging / name)
            shutil.rmtree(folder, ignore_errors=True)
            staging.rename(folder)
        finally:
            incoming.unlink(missing_ok=True)
            shutil.rmtree(staging, ignore_errors=True)
        return folder / name

    def _apply(self, offer: pb.WeightsOffer, incoming: Path, path: Path) -> None:
        """Write the file of a version by patching a copy of its base."""
        data = incoming.read_bytes()
        head = patch.read_head(data)
        if (head.base_digest, head.digest) != (offer.base_digest, offer.digest):
            raise patch.PatchCorrupt(f"the patch is from {head.base_digest} to {head.digest}, which was not offered")
        shutil.copyfile(self._files[offer.base_digest], path)
        with open(path, "r+b") as file:
            patch.apply(data, mmap.mmap(file.fileno(), 0))
        self._patches[offer.base_digest, offer.digest] = data
        while len(self._patches) > _PATCHES:
            del self._patches[next(iter(self._patches))]

    def _prune(self, root: Path) -> None:
        """Remove older versions and abandoned partial transfers."""
        while len(self._files) > _KEPT:
            shutil.rmtree(self._files.pop(next(iter(self._files))).parent, ignore_errors=True)
        for left in root.glob("incoming-*"):
            left.unlink(missing_ok=True)


def described(offers: Sequence[pb.WeightsOffer]) -> str:
    """A summary for logs: ``patch, 4120 bytes``."""
    return "; ".join(f"{_form(offer)}, {offer.bytes} bytes" for offer in offers)


def _form(offer: pb.WeightsOffer) -> str:
    return pb.WeightsForm.Name(offer.form).rpartition("_")[2].lower()


def mapped(path: Path) -> memoryview:
    """The mapped bytes of a file, valid also after its removal. Raises ``OSError``."""
    with open(path, "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _check(path: Path) -> None:
    try:
        read_layout(mapped(path))
    except (ValueError, OSError) as error:
        raise TransferCorrupt(f"the received bytes are not a safetensors file: {error}") from error
