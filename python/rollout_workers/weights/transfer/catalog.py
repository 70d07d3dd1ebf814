"""The versions that the learner offers to workers without access to its folder: the newest versions
as a whole, and patches between them."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rollout.weights.v1 import weights_pb2 as pb
from rollout_workers.weights.transfer import patch
from rollout_workers.weights.transfer.artifacts import StoredWeights
from rollout_workers.weights.transfer.cache import ADAPTER_FILE, TENSOR_FILE, mapped
from rollout_workers.weights.transfer.errors import VersionNotFound

log = logging.getLogger(__name__)

_WHOLE = 2  # versions
_PATCHES = 16
_SHARE = 0.5  # share of the whole size above which a patch is not used
_DENSE_VERSIONS = 16  # number of versions for which no patch is tried after too much had changed


@dataclass(frozen=True, slots=True)
class Published:
    """A published version. data: its file, with all tensors or only adapters."""

    version: int
    digest: str
    form: pb.WeightsForm.ValueType
    data: memoryview


@dataclass(frozen=True, slots=True)
class _Link:
    base_version: int
    base: str
    version: int
    data: bytes


class Catalog:
    """Offers versions and patches. No patch is encoded before a worker asks for one; from then on
    each version's patch is encoded when the version is published.

    ``published`` belongs to the trainer's thread, other methods may be called from any thread.
    """

    def __init__(self, stored: StoredWeights | None = None, threads: int | None = None) -> None:
        """stored: uploads to the storage service, if weights are transferred that way. threads:
        number of encoding threads; default: half of the cores."""
        self._stored = stored
        self._threads = threads or max(1, (os.cpu_count() or 1) // 2)
        self._lock = threading.Lock()
        self._encoding = ThreadPoolExecutor(1, thread_name_prefix="patch")
        self._versions: dict[str, Published] = {}
        self._links: dict[str, _Link] = {}  # by the digest of the newer version
        self._wanted = False
        self._dense = -1  # no patch is tried up to this version

    def published(self, version: int, digest: str, folder: Path) -> None:
        """Add the version in ``folder``. It replaces earlier versions with the same digest, which
        are the same weights in another form."""
        form = pb.WEIGHTS_FORM_ADAPTER if (folder / ADAPTER_FILE).is_file() else pb.WEIGHTS_FORM_WHOLE
        data = mapped(folder / (ADAPTER_FILE if form == pb.WEIGHTS_FORM_ADAPTER else TENSOR_FILE))
        with self._lock:
            before = next(reversed(self._versions.values()), None)
            self._versions.pop(digest, None)
            self._versions[digest] = Published(version, digest, form, data)
            while len(self._versions) > _WHOLE:
                del self._versions[next(iter(self._versions))]
            eager = self._wanted and before is not None
        if eager and before is not None and before.digest != digest:
            self._encoding.submit(self._link, before, self._versions[digest])

    def find(self, digest: str, form: int, base_digest: str) -> memoryview:
        """The bytes of a form of a version. Raises ``VersionNotFound``."""
        if form == pb.WEIGHTS_FORM_PATCH:
            link = self._links.get(digest)
            if link is None or link.base != base_digest:
                raise VersionNotFound(f"this worker has no patch from {base_digest} to {digest}")
            return memoryview(link.data)
        version = self._version(digest)
        if version.form != form:
            raise VersionNotFound(f"this worker has {digest} in another form", fix="request new offers")
        return version.data

    def adapts(self, digest: str) -> bool:
        """Whether a version was published as adapters only."""
        version = self._versions.get(digest)
        return version is not None and version.form == pb.WEIGHTS_FORM_ADAPTER

    async def offers(self, digest: str, base_digest: str, *, whole: bool, store: bool) -> list[pb.WeightsOffer]:
        """The offers of a version for a worker that has ``base_digest`` (empty: unknown). whole:
        without patches and adapters.

        Raises ``VersionNotFound`` and the errors of storing.
        """
        version = self._version(digest)
        if whole and version.form == pb.WEIGHTS_FORM_ADAPTER:
            raise VersionNotFound(f"{digest} was published as adapters only", fix="the next version is published whole")
        offers = [pb.WeightsOffer(version=version.version, digest=digest, form=version.form)]
        if not whole and version.form == pb.WEIGHTS_FORM_WHOLE and base_digest and base_digest != digest:
            offers = await asyncio.get_running_loop().run_in_executor(self._encoding, self._chain, base_digest, version) or offers
        for offer in offers:
            data = await asyncio.to_thread(self.find, offer.digest, offer.form, offer.base_digest)
            offer.bytes = len(data)
            if store and self._stored is not None:
                name = f"{pb.WeightsForm.Name(offer.form)} {offer.base_digest} {offer.digest}"
                offer.content_id = await self._stored.put(name, data)
        return offers

    async def close(self, *, keep: bool = False) -> None:
        """keep: do not delete the artifacts in the storage service, because another learner uses
        them."""
        self._encoding.shutdown(wait=False, cancel_futures=True)
        if self._stored is not None and not keep:
            await self._stored.close()

    def _version(self, digest: str) -> Published:
        version = self._versions.get(digest)
        if version is None:
            raise VersionNotFound(f"{digest} is no longer published", fix="ask for the newest version")
        return version

    def _chain(self, base_digest: str, wanted: Published) -> list[pb.WeightsOffer]:
        """The patches from one version to another; empty if they are too large. Runs in the
        encoding thread."""
        self._wanted = True
        with self._lock:
            base = self._versions.get(base_digest)
        if base is not None:
            self._link(base, wanted)
        links: list[_Link] = []
        digest = wanted.digest
        while digest != base_digest:
            link = self._links.get(digest)
            if link is None or len(links) >= _PATCHES:
                return []
            links.insert(0, link)
            digest = link.base
        if sum(len(link.data) for link in links) > _SHARE * len(wanted.data):
            return []
        reached = [link.base for link in links[1:]] + [wanted.digest]
        return [
            pb.WeightsOffer(
                version=link.version,
                digest=digest,
                form=pb.WEIGHTS_FORM_PATCH,
                base_version=link.base_version,
                base_digest=link.base,
            )
            for link, digest in zip(links, reached, strict=True)
        ]

    def _link(self, base: Published, wanted: Published) -> None:
        """Encode the patch from one version to the next, once."""
        known = self._links.get(wanted.digest)
        if (known is not None and known.base == base.digest) or wanted.version <= self._dense:
            return
        if base.form != pb.WEIGHTS_FORM_WHOLE or wanted.form != pb.WEIGHTS_FORM_WHOLE:
            return
        ends = patch.Ends(base.version, base.digest, wanted.version, wanted.digest)
        try:
            data = patch.encode(base.data, wanted.data, ends, most_bytes=int(_SHARE * len(wanted.data)), threads=self._threads)
        except Exception:
            log.exception("no patch from version %d to %d", base.version, wanted.version)
            data = None
        if data is None:
            self._dense, self._wanted = wanted.version + _DENSE_VERSIONS, False
            return
        with self._lock:
            self._links.pop(wanted.digest, None)
            self._links[wanted.digest] = _Link(base.version, base.digest, wanted.version, data)
            size = sum(len(link.data) for link in self._links.values())
            while len(self._links) > 1 and (len(self._links) > _PATCHES or size > _SHARE * len(wanted.data)):
                size -= len(self._links.pop(next(iter(self._links))).data)
