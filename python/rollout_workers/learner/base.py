"""The model of a run that trains adapters, as files of its snapshots.

A snapshot names the files by the digests in the plan. The storage service has each content once,
for all snapshots and runs, until no snapshot names it any more.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from blake3 import blake3

from rollout import names
from rollout.plan.v1.plan_pb2 import INPUT_ROLE_MODEL
from rollout.run.v1.run_pb2 import WorkerSpec
from rollout.snapshot.v1.snapshot_pb2 import SnapshotFile
from rollout.storage.v1.storage_pb2 import StatArtifactsRequest
from rollout.storage.v1.storage_pb2_grpc import ArtifactServiceStub
from rollout_workers.worker.discovery import Services, call
from rollout_workers.worker.spec import model_directory, resolve
from rollout_workers.worker.status import EdgeError

log = logging.getLogger(__name__)

FOLDER = "base"
"""The folder of these files in a snapshot."""
_CLONE = 0x40049409  # FICLONE
_CHUNK = 1 << 22


class BaseModelChanged(EdgeError):
    """A file of the run's model is missing, or has other content than in the plan."""

    reason: ClassVar[str] = "BASE_MODEL_CHANGED"


@dataclass(frozen=True, slots=True)
class BaseFile:
    """A file of the run's model. path: relative to the model's folder. digest, bytes: from the
    plan."""

    path: str
    source: Path
    digest: str
    bytes: int


Stored = Callable[[Collection[str]], Awaitable[Collection[str]]]
"""Selects those digests whose content the storage service has."""


class Base:
    """The model of one run. ``keep`` copies the files that are not stored yet, so that the user may
    change the model during the run. The copy is removed once a snapshot has the files, or when the
    learner exits."""

    def __init__(self, files: Sequence[BaseFile], folder: Path, stored: Stored) -> None:
        """folder: for the copy, in the run's folder. ``base-*`` next to it are removed: copies of
        learners that died."""
        self._files, self._folder, self._stored = files, folder, stored
        self._keeping: asyncio.Task[None] | None = None

    def keep(self) -> None:
        """Begin to copy the files, in the background. ``stage`` copies what is missing then."""
        self._keeping = asyncio.create_task(self._keep(), name="copy the base model")
        self._keeping.add_done_callback(_log_failure)

    async def stage(self, state: Path) -> list[SnapshotFile]:
        """Add the files that are not stored yet to the folder of a state, and return the entries of
        all files. Raises :class:`BaseModelChanged`, ``OSError``, and the errors of ``stored``."""
        if self._keeping is not None:
            await asyncio.wait({self._keeping})  # what it could not copy is copied below
        missing = await self._missing()
        if not missing:
            await asyncio.to_thread(shutil.rmtree, self._folder, True)
        for file in missing:
            await asyncio.to_thread(self._stage, file, state / FOLDER / file.path)
        return [SnapshotFile(path=f"{FOLDER}/{file.path}", digest=file.digest, bytes=file.bytes) for file in self._files]

    async def close(self) -> None:
        """Remove the copy."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        await asyncio.to_thread(shutil.rmtree, self._folder, True)

    async def _keep(self) -> None:
        for old in self._folder.parent.glob(f"{FOLDER}-*"):
            await asyncio.to_thread(shutil.rmtree, old, True)
        for file in await self._missing():
            await asyncio.to_thread(copy_verified, file, self._folder / file.path)

    async def _missing(self) -> list[BaseFile]:
        stored = await self._stored({file.digest for file in self._files})
        return [file for file in self._files if file.digest not in stored]

    def _stage(self, file: BaseFile, target: Path) -> None:
        """Link the copy into the folder of a state. Without a copy, because the disk was full or
        the files were stored when the run began and are deleted by now, copy the user's file."""
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(self._folder / file.path, target)
        except OSError:
            own = self._folder / file.path
            copy_verified(BaseFile(file.path, own, file.digest, file.bytes) if own.is_file() else file, target)


def base_of(spec: WorkerSpec, services: Services) -> Base | None:
    """The base of a run that trains adapters; None for other runs."""
    if not spec.plan.config.HasField("lora"):
        return None
    model = Path(model_directory(spec))
    files: list[BaseFile] = []
    for entry in spec.plan.inputs:
        source = Path(resolve(spec, entry.path))
        if entry.role == INPUT_ROLE_MODEL and source.is_relative_to(model):
            files.append(BaseFile(source.relative_to(model).as_posix(), source, entry.digest, entry.bytes))

    async def stored(digests: Collection[str]) -> Collection[str]:
        request = StatArtifactsRequest(content_ids=sorted(digests))
        answer = await call(services, names.STORAGE_SERVICE, ArtifactServiceStub, "StatArtifacts", request)
        return {artifact.content_id for artifact in answer.artifacts if artifact.exists}

    return Base(files, Path(spec.run_directory) / f"{FOLDER}-{spec.incarnation}", stored)


def copy_verified(file: BaseFile, target: Path) -> None:
    """Copy a file to ``target``, without using disk space if the file system can share the blocks.
    ``target`` appears when it is complete. Raises :class:`BaseModelChanged`, ``OSError``."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    try:
        with open(file.source, "rb") as source, open(staging, "wb") as out:
            try:
                fcntl.ioctl(out, _CLONE, source.fileno())
            except OSError:
                shutil.copyfileobj(source, out, _CHUNK)
        digest = f"blake3-{blake3(max_threads=blake3.AUTO).update_mmap(str(staging)).hexdigest()}"
        if digest != file.digest:
            raise BaseModelChanged(
                f"{file.source} has the digest {digest}, but the plan of the run has {file.digest}",
                fix="restore the file, or start a new run with `rollout run --config FILE`",
            )
        staging.rename(target)
    except FileNotFoundError as error:
        raise BaseModelChanged(
            f"{file.source} does not exist any more, but the plan of the run has it with the digest {file.digest}",
            fix="restore the file, or start a new run with `rollout run --config FILE`",
        ) from error
    finally:
        staging.unlink(missing_ok=True)


def _log_failure(done: asyncio.Task[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.error("the base model could not be copied; the next snapshot tries again: %s", error)
