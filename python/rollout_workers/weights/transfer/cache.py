"""Versions that came over the network, as folders of this host that an engine stages like the learner's own."""

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
_KEPT = 2  # versions: the newest, and the one before it, which others may be sent a patch of
_PATCHES = 4


class Fetches(Protocol):
    """What brings the bytes of an offer."""

    async def fetch(self, offer: pb.WeightsOffer, path: Path) -> None: ...


class WeightsCache:
    """Belongs to one inference worker. Nothing here says that a version is right: the digest of what is staged from it does."""

    def __init__(
        self, run: str, run_directory: str, worker: str, fetcher: Fetches, memory: Callable[[str], SharedMemory] = SharedMemory
    ) -> None:
        """Weights lie in shared memory where there is enough of it, else below ``run_directory``."""
        self._run, self._fetcher, self._make_memory = run, fetcher, memory
        self._own = Path(run_directory) / "received" / worker
        self._memory: SharedMemory | None = None
        self._root: Path | None = None
        self._held: dict[str, Path] = {}  # file of each version by digest, the newest last
        self._patches: dict[tuple[str, str], bytes] = {}  # by base and digest
        self._read = ("", Path())  # what the engine took from a folder of this host, and its digest
        self._turn = asyncio.Lock()

    async def bring(self, offers: Sequence[pb.WeightsOffer]) -> str:
        """The folder of the last offer's version, which is there when this returns.

        Cut off anywhere, it leaves nothing but the beginning of a transfer, from which the next call goes on. Raises
        :class:`BaseMissing`, ``SourcesLost``, ``PatchCorrupt``, :class:`TransferCorrupt`, ``OSError``.
        """
        async with self._turn:
            wanted = offers[-1].digest
            if wanted not in self._held:
                first = offers[0]
                if first.form == pb.WEIGHTS_FORM_PATCH and first.base_digest not in self._held:
                    raise BaseMissing(
                        f"a patch upon version {first.base_version} ({first.base_digest}) came, which is not here",
                        fix="send the whole",
                    )
                root = await asyncio.to_thread(self._room, max(offer.bytes for offer in offers))
                try:
                    for offer in offers:
                        await self._take(root, offer)
                    await asyncio.to_thread(self._prune, root)
                except OSError as error:
                    if error.errno == errno.ENOSPC and root != self._own:
                        log.warning("%s is full; weights go to %s from now on", root, self._own)
                        self._root = self._own
                    raise
            return str(self._held[wanted].parent)

    async def _take(self, root: Path, offer: pb.WeightsOffer) -> None:
        if offer.digest in self._held:
            return
        incoming = root / f"incoming-{_form(offer)}-{offer.base_digest[7:23]}-{offer.digest[7:]}"
        await self._fetcher.fetch(offer, incoming)
        self._held[offer.digest] = await asyncio.to_thread(self._unpack, root, offer, incoming)

    async def discard(self, digest: str) -> None:
        """Forget a version that turned out to be something else than its digest, and all that was made here."""
        async with self._turn:
            if digest in self._held:
                for path in self._held.values():
                    await asyncio.to_thread(shutil.rmtree, path.parent, True)
                self._held.clear()
                self._patches.clear()

    def note(self, digest: str, directory: str) -> None:
        """A version that the engine took from a folder of this host can be streamed to others as long as that is there."""
        if all(str(path.parent) != directory for path in self._held.values()):
            self._read = (digest, Path(directory))

    def find(self, digest: str, form: int, base_digest: str) -> memoryview:
        """Bytes for another worker. Raises :class:`VersionNotFound`."""
        try:
            if form == pb.WEIGHTS_FORM_PATCH:
                return memoryview(self._patches[base_digest, digest])
            path = self._held.get(digest)
            if path is None and digest == self._read[0]:
                path = self._read[1] / (ADAPTER_FILE if form == pb.WEIGHTS_FORM_ADAPTER else TENSOR_FILE)
            if path is not None and (path.name == ADAPTER_FILE) == (form == pb.WEIGHTS_FORM_ADAPTER):
                return mapped(path)
        except (KeyError, OSError):
            pass
        raise VersionNotFound(f"{digest} is not here as {pb.WeightsForm.Name(pb.WeightsForm.ValueType(form))}")

    def close(self) -> None:
        """Remove everything."""
        self._held.clear()
        if self._memory is not None:
            self._memory.close()
        shutil.rmtree(self._own, ignore_errors=True)

    def _room(self, size: int) -> Path:
        """Where versions of so many bytes lie."""
        if self._root is None:
            self._memory = self._make_memory(self._run)
            self._root = self._memory.folder if self._memory.fits(size) else self._own
            assert self._root is not None
            shutil.rmtree(self._own, ignore_errors=True)  # of a process that died
        self._root.mkdir(parents=True, exist_ok=True)
        return self._root

    def _unpack(self, root: Path, offer: pb.WeightsOffer, incoming: Path) -> Path:
        """The file of the version that came; ``incoming`` is used up, also where it is no such thing."""
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
        """Make the file of a version from the one before it, of which nothing is changed."""
        data = incoming.read_bytes()
        head = patch.read_head(data)
        if (head.base_digest, head.digest) != (offer.base_digest, offer.digest):
            raise patch.PatchCorrupt(f"the patch leads from {head.base_digest} to {head.digest}, another one was offered")
        shutil.copyfile(self._held[offer.base_digest], path)
        with open(path, "r+b") as file:
            patch.apply(data, mmap.mmap(file.fileno(), 0))
        self._patches[offer.base_digest, offer.digest] = data
        while len(self._patches) > _PATCHES:
            del self._patches[next(iter(self._patches))]

    def _prune(self, root: Path) -> None:
        """Remove older versions, and the beginnings of transfers that nobody waits for any more."""
        while len(self._held) > _KEPT:
            shutil.rmtree(self._held.pop(next(iter(self._held))).parent, ignore_errors=True)
        for left in root.glob("incoming-*"):
            left.unlink(missing_ok=True)


def described(offers: Sequence[pb.WeightsOffer]) -> str:
    """What was brought, for people: ``patch, 4120 bytes``."""
    return "; ".join(f"{_form(offer)}, {offer.bytes} bytes" for offer in offers)


def _form(offer: pb.WeightsOffer) -> str:
    return pb.WeightsForm.Name(offer.form).rpartition("_")[2].lower()


def mapped(path: Path) -> memoryview:
    """The bytes of a file, good also after it was removed. Raises ``OSError``."""
    with open(path, "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _check(path: Path) -> None:
    try:
        read_layout(mapped(path))
    except (ValueError, OSError) as error:
        raise TransferCorrupt(f"what came is no file of tensors: {error}") from error
