"""The digest of the current weights and their publication."""

from __future__ import annotations

from rollout.weights.v1.weights_pb2 import WeightsManifest, WeightsOffer
from rollout_workers.learner.publication import Publication
from rollout_workers.learner.trainer_thread import TrainerThread
from rollout_workers.trainer import Trainer

_PREPARE_SECONDS = 0.02


class PublishedWeights:
    """Publishes the trainer's weights."""

    def __init__(self, thread: TrainerThread, publication: Publication) -> None:
        self._thread, self._publication = thread, publication
        self._digested = -1, ""  # a step, and the digest of its weights

    @property
    def digest(self) -> str:
        """The digest of the current weights; empty if it was not computed."""
        step, digest = self._digested
        return digest if step == self._thread.step else ""

    async def read_digest(self) -> None:
        """Compute ``digest`` from the trainer's weights."""
        await self._thread.run(self.compute_digest)

    def compute_digest(self, trainer: Trainer) -> str:
        """``read_digest`` for calls that run in the trainer's thread already; blocks."""
        self._digested = trainer.step, trainer.weights_digest().root
        return self._digested[1]

    async def publish(self) -> WeightsManifest:
        """Write the weights of the current step."""
        manifest = await self._thread.run(self.write)
        self.prepare()
        return manifest

    def write(self, trainer: Trainer) -> WeightsManifest:
        """``publish`` for calls that run in the trainer's thread already; blocks."""
        manifest = self._publication.publish(trainer)
        self._digested = trainer.step, manifest.digest
        return manifest

    def prepare(self) -> None:
        """Reserve memory for the next weights, a moment later so that it does not delay this
        version."""
        self._thread.run_later(_PREPARE_SECONDS, self._publication.prepare)

    async def offers(self, digest: str, base_digest: str, *, whole: bool, store: bool) -> list[WeightsOffer]:
        """Ways to get a published version without access to its folder. Raises ``VersionNotFound``
        and the errors of storing."""
        catalog = self._publication.catalog
        if whole and catalog.adapts(digest):
            await self._thread.run(self._publication.make_whole)
        return await catalog.offers(digest, base_digest, whole=whole, store=store)
