"""Weights that arrive over the network are loaded like those of a folder, and samples have their
receipt."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from rollout.inference.v1 import inference_pb2 as pb
from rollout.weights.v1 import weights_pb2
from rollout.weights.v1.weights_pb2_grpc import WeightsServiceStub, add_WeightsServiceServicer_to_server
from rollout_testing.credential import peer_token
from rollout_testing.daemon import Daemon
from rollout_testing.run import Example, RunStreams, prompt_group
from rollout_workers.weights import read_weights, weights_digest, write_weights
from rollout_workers.weights.transfer import catalog, service
from rollout_workers.weights.transfer.catalog import Catalog
from rollout_workers.worker.serving import Server
from rollout_workers.worker.spec import Identity

from .test_server import reason_of
from .test_weights import Loader


class Publisher:
    """A learner as seen by workers: a catalog behind a server. Workers have no access to its
    folders."""

    def __init__(self, example: Example, folder: Path, run: str, token: str) -> None:
        self._example, self._folder, self._run = example, folder, run
        self._tensors = {name: tensor.clone() for name, tensor in read_weights(example.model).items()}
        self.catalog = Catalog(threads=1)
        self.server = Server(token)
        holder = service.WeightsServer(Identity(run, "learner-0", "learner", 1), self.catalog)
        add_WeightsServiceServicer_to_server(holder, self.server.grpc)

    async def start(self) -> Publisher:
        self.address = await self.server.start([service.SERVICE])
        return self

    def publish(self, version: int) -> weights_pb2.WeightsManifest:
        """The model with a few changed values."""
        next(iter(self._tensors.values()))[0, :3] += 0.5
        folder = self._folder / f"v{version}"
        write_weights(folder, self._tensors.items(), config_source_dir=self._example.model, version=version)
        digest = weights_digest(self._tensors.items()).root
        self.catalog.published(version, digest, folder)
        return weights_pb2.WeightsManifest(run_id=self._run, version=version, digest=digest, directory="/not/here")

    async def request(self, manifest: weights_pb2.WeightsManifest, base: str = "") -> pb.LoadWeightsRequest:
        offers = await self.catalog.offers(manifest.digest, base, whole=False, store=False)
        for offer in offers:
            offer.peers.append(self.address)
        return pb.LoadWeightsRequest(weights=manifest, offers=offers)


@pytest.fixture
async def publisher(daemon: Daemon, example: Example, run: str, tmp_path: Path) -> AsyncIterator[Publisher]:
    made = await Publisher(example, tmp_path, run, peer_token(daemon.token, run)).start()
    yield made
    await made.server.stop(0)
    await made.catalog.close()


async def test_a_worker_on_another_host_receives_weights(
    daemon: Daemon, example: Example, run: str, publisher: Publisher, streams: RunStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = await Loader(daemon, example, run).start()
    metadata = loader.made.metadata
    first = publisher.publish(1)
    assert await loader.refused(first) == (grpc.StatusCode.FAILED_PRECONDITION, "WEIGHTS_UNREADABLE")
    got = await loader._stub.LoadWeights(await publisher.request(first), metadata=metadata)
    assert (got.receipt.version, got.receipt.digest) == (1, first.digest)

    second = publisher.publish(2)
    request = await publisher.request(second, first.digest)
    assert [offer.form for offer in request.offers] == [weights_pb2.WEIGHTS_FORM_PATCH]
    got = await loader._stub.LoadWeights(request, metadata=metadata)
    assert (got.receipt.version, got.receipt.digest) == (2, second.digest)

    await streams.issue([prompt_group(0, example.rows(1)[0], run=run)])
    for envelope in await streams.collect(4):
        assert envelope.header.receipt == got.receipt

    assert loader.made.channel is not None
    other = WeightsServiceStub(loader.made.channel)
    fetch = weights_pb2.FetchWeightsRequest(run_id=run, digest=second.digest, form=weights_pb2.WEIGHTS_FORM_WHOLE, offset=100)
    served = b"".join([piece.chunk async for piece in other.FetchWeights(fetch, metadata=metadata)])
    assert served == bytes(publisher.catalog.find(second.digest, weights_pb2.WEIGHTS_FORM_WHOLE, ""))[100:]
    assert await loader.made.stop() == 0


async def test_weights_that_cannot_be_loaded_leave_the_old_ones_in_use(
    daemon: Daemon, example: Example, run: str, publisher: Publisher
) -> None:
    loader = await Loader(daemon, example, run).start()
    metadata = loader.made.metadata

    async def refused(request: pb.LoadWeightsRequest) -> str:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await loader._stub.LoadWeights(request, metadata=metadata)
        return reason_of(caught.value)[1]

    first, second = publisher.publish(1), publisher.publish(2)
    before = (await loader.status()).receipt
    assert await refused(await publisher.request(second, first.digest)) == "WEIGHTS_BASE_MISSING"
    gone = await publisher.request(second)
    gone.offers[0].peers[:] = ["127.0.0.1:1"]
    assert await refused(gone) == "WEIGHTS_SOURCES_LOST"
    lie = await publisher.request(first)
    lie.weights.digest = lie.offers[0].digest = second.digest
    publisher.catalog._versions[second.digest] = publisher.catalog._versions[first.digest]
    assert await refused(lie) == "WEIGHTS_DIGEST_MISMATCH"
    assert (await loader.status()).receipt == before
    third = publisher.publish(3)
    got = await loader._stub.LoadWeights(await publisher.request(third), metadata=metadata)
    assert got.receipt.digest == third.digest
    assert await loader.made.stop() == 0


def test_patches_of_small_models_are_smaller_than_the_weights(example: Example) -> None:
    """The tests above assume this."""
    assert catalog._SHARE * (example.model / "model.safetensors").stat().st_size > 1000
