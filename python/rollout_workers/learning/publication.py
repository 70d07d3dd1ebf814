"""Weights on disk, where inference workers of this host read them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from rollout.weights.v1 import weights_pb2 as pb
from rollout_workers.learner import Trainer

_FOLDER = re.compile(r"v(\d+)")


class Publication:
    """The folder ``<run>/weights``: one folder a version, of which the last two stay."""

    def __init__(self, run: str, run_directory: str) -> None:
        self._run = run
        self._root = Path(run_directory) / "weights"

    def publish(self, trainer: Trainer) -> pb.WeightsManifest:
        """Write the weights as they stand, complete and renamed into place; blocks.

        Not fsynced: after a power cut the digest tells, and a snapshot brings them back.
        """
        folder = self._root / f"v{trainer.step:06d}"
        written = trainer.write_weights(folder, fsync=False)
        self._prune(trainer.step)
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

    def _prune(self, current: int) -> None:
        """Remove what is older than the version before ``current``. Newer ones stay: the mesh may serve them yet."""
        older = sorted(
            (int(match[1]), path)
            for path in self._root.iterdir()
            if (match := _FOLDER.fullmatch(path.name)) and int(match[1]) < current
        )
        for _, path in older[:-1]:
            shutil.rmtree(path, ignore_errors=True)
