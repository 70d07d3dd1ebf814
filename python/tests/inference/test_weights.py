"""New weights are loaded completely or not at all, and the receipt has the digest of the engine's
weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import grpc
import pytest
import torch

from rollout.inference.v1 import inference_pb2 as pb
from rollout.inference.v1.inference_pb2_grpc import InferenceWorkerServiceStub
from rollout.weights.v1.weights_pb2 import WeightsManifest, WeightsReceipt
from rollout_testing.daemon import Daemon
from rollout_testing.run import Example, config, spec
from rollout_testing.worker import InProcess
from rollout_workers.engines.errors import EngineFailed
from rollout_workers.engines.transformers import TransformersEngine
from rollout_workers.engines.transformers.config import EngineConfig
from rollout_workers.inference import monitor, updates
from rollout_workers.inference.model import Model, load
from rollout_workers.inference.receipt import EngineReceipts, Verification
from rollout_workers.weights import read_weights, weights_digest, write_weights

from .test_server import reason_of


def version(example: Example, folder: Path, number: int, run: str) -> WeightsManifest:
    """The model's weights, each increased by ``number`` / 100, in the form that the learner
    publishes."""
    tensors = {name: tensor + number / 100 for name, tensor in read_weights(example.model).items()}
    write_weights(folder / f"v{number}", tensors.items(), config_source_dir=example.model, version=number)
    digest = weights_digest(tensors.items()).root
    return WeightsManifest(run_id=run, version=number, digest=digest, directory=str(folder / f"v{number}"))


class Loader:
    """A worker and a client for its LoadWeights."""

    def __init__(self, daemon: Daemon, example: Example, run: str, **changes: Any) -> None:
        self.spec = spec(daemon, config(example, **changes), run=run)
        self.model = load(self.spec)

    async def start(self) -> Self:
        self.made = InProcess(self.spec, model=self.model)
        await self.made.start()
        return self

    async def load(self, manifest: WeightsManifest) -> WeightsReceipt:
        request = pb.LoadWeightsRequest(weights=manifest)
        return (await self._stub.LoadWeights(request, metadata=self.made.metadata)).receipt

    async def status(self) -> Any:
        return await self._stub.GetInferenceStatus(pb.GetInferenceStatusRequest(), metadata=self.made.metadata)

    async def refused(self, manifest: WeightsManifest) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.load(manifest)
        return reason_of(caught.value)

    @property
    def _stub(self) -> Any:
        assert self.made.channel is not None
        return InferenceWorkerServiceStub(self.made.channel)


async def test_loads_weights_and_returns_their_digest(daemon: Daemon, example: Example, run: str, tmp_path: Path) -> None:
    loader = await Loader(daemon, example, run).start()
    before = (await loader.status()).receipt
    assert before.digest == weights_digest(read_weights(example.model).items()).root
    manifest = version(example, tmp_path, 3, run)
    receipt = await loader.load(manifest)
    assert (receipt.version, receipt.digest) == (3, manifest.digest)
    assert receipt.cache_epoch > before.cache_epoch
    assert await loader.load(manifest) == receipt  # loading is idempotent
    assert (await loader.status()).receipt == receipt
    older = version(example, tmp_path, 1, run)
    assert (await loader.load(older)).version == 1  # a restored run returns to an older version
    assert await loader.made.stop() == 0


async def test_weights_with_another_digest_leave_the_old_ones_in_use(
    daemon: Daemon, example: Example, run: str, tmp_path: Path
) -> None:
    loader = await Loader(daemon, example, run).start()
    before = (await loader.status()).receipt
    good = version(example, tmp_path, 1, run)
    lying = WeightsManifest(run_id=run, version=1, digest="blake3-" + "0" * 64, directory=good.directory)
    assert await loader.refused(lying) == (grpc.StatusCode.FAILED_PRECONDITION, "WEIGHTS_DIGEST_MISMATCH")
    assert (await loader.status()).receipt == before
    path = tmp_path / "v1" / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert await loader.refused(good) == (grpc.StatusCode.FAILED_PRECONDITION, "WEIGHTS_DIGEST_MISMATCH")
    path.write_bytes(whole)
    assert (await loader.load(good)).version == 1
    assert await loader.made.stop() == 0


async def test_a_missing_folder_is_not_a_mismatch(daemon: Daemon, example: Example, run: str, tmp_path: Path) -> None:
    loader = await Loader(daemon, example, run).start()
    good = version(example, tmp_path, 1, run)
    gone = WeightsManifest(run_id=run, version=2, digest=good.digest, directory=str(tmp_path / "v2"))
    assert await loader.refused(gone) == (grpc.StatusCode.FAILED_PRECONDITION, "WEIGHTS_UNREADABLE")
    other = WeightsManifest(run_id="another", version=1, digest=good.digest, directory=good.directory)
    assert await loader.refused(other) == (grpc.StatusCode.INVALID_ARGUMENT, "RUN_MISMATCH")
    assert await loader.made.stop() == 0


async def test_a_worker_without_valid_weights_is_fenced(
    daemon: Daemon, example: Example, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updates, "INVALID_WEIGHTS_SECONDS", 0.05)
    loader = await Loader(daemon, example, run).start()
    good = version(example, tmp_path, 1, run)
    lying = WeightsManifest(run_id=run, version=1, digest="blake3-" + "0" * 64, directory=good.directory)
    await loader.refused(lying)
    assert await loader.made.ended() == 3


async def test_a_flipped_byte_after_the_swap_fences_the_worker(
    daemon: Daemon, example: Example, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = await Loader(daemon, example, run).start()
    swap = TransformersEngine.swap_weights

    async def spoiled(self: TransformersEngine, number: int) -> None:
        await swap(self, number)
        flip(loader.model)

    monkeypatch.setattr(TransformersEngine, "swap_weights", spoiled)
    manifest = version(example, tmp_path, 1, run)
    assert await loader.refused(manifest) == (grpc.StatusCode.FAILED_PRECONDITION, "WEIGHTS_DIGEST_MISMATCH")
    assert await loader.made.ended() == 3


async def test_verification_detects_a_flipped_byte(
    daemon: Daemon, example: Example, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "VERIFY_LEAST_SECONDS", 0.05)
    loader = await Loader(daemon, example, run).start()
    flip(loader.model)
    assert await loader.made.ended() == 3
    assert "the engine has" in loader.made.lifecycle.reason


async def test_a_failed_verification_is_retried(
    daemon: Daemon, example: Example, run: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(monitor, "VERIFY_LEAST_SECONDS", 0.05)
    loader = await Loader(daemon, example, run).start()
    digest = TransformersEngine.weights_digest
    failures = iter([EngineFailed("out of memory")])

    async def failing(self: TransformersEngine) -> str:
        for error in failures:
            flip(loader.model)
            raise error
        return await digest(self)

    monkeypatch.setattr(TransformersEngine, "weights_digest", failing)
    assert await loader.made.ended() == 3
    assert "the engine has" in loader.made.lifecycle.reason
    assert "could not verify" in caplog.text


async def test_sampled_verification_reads_random_tensors_and_all_at_snapshots(
    daemon: Daemon, example: Example, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = await Loader(daemon, example, run, weights={"verify": "sampled"}, snapshot={"every_steps": 2}).start()
    assert (await loader.status()).receipt.verify == "full"  # before the first step
    first, second = version(example, tmp_path, 1, run), version(example, tmp_path, 2, run)
    receipt = await loader.load(first)
    assert (receipt.digest, receipt.verify) == (first.digest, "sampled")
    receipt = await loader.load(second)
    assert (receipt.digest, receipt.verify) == (second.digest, "full")
    swap = TransformersEngine.swap_weights

    async def spoiled(self: TransformersEngine, number: int) -> None:
        await swap(self, number)
        flip(loader.model)

    monkeypatch.setattr(TransformersEngine, "swap_weights", spoiled)
    third = version(example, tmp_path, 3, run)
    assert await loader.refused(third) == (grpc.StatusCode.FAILED_PRECONDITION, "WEIGHTS_DIGEST_MISMATCH")
    assert await loader.made.ended() == 3


async def test_without_verification_nothing_is_read_back_and_the_receipt_shows_it(
    daemon: Daemon, example: Example, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unreadable(self: TransformersEngine, *_: int) -> str:
        raise AssertionError("the tensors of the engine were read")

    monkeypatch.setattr(monitor, "VERIFY_LEAST_SECONDS", 0.05)
    monkeypatch.setattr(TransformersEngine, "weights_digest", unreadable)
    monkeypatch.setattr(TransformersEngine, "check_weights", unreadable)
    loader = await Loader(daemon, example, run, weights={"verify": "none"}).start()
    assert (await loader.status()).receipt.digest == ""  # and no group is sampled yet
    manifest = version(example, tmp_path, 1, run)
    receipt = await loader.load(manifest)
    assert (receipt.version, receipt.digest, receipt.verify) == (1, manifest.digest, "none")
    engines = (await loader.status()).engines
    assert [(each.version, each.digest, each.verify) for each in engines] == [(1, manifest.digest, "none")]
    assert await loader.made.stop() == 0


async def test_without_verification_the_first_receipt_has_the_version_of_the_engine(example: Example) -> None:
    engine = TransformersEngine.load(example.model, EngineConfig(slots=2, max_len=32), version=7)
    try:
        receipts = EngineReceipts(engine, verification=Verification("none"))
        receipt = await receipts.read_back()
        assert (receipt.version, receipt.digest, receipt.verify) == (7, "", "none") and receipts.current == receipt
        assert receipts.version == -1, "no group is sampled yet"
    finally:
        await engine.shutdown()


async def test_random_tensors_are_compared_with_those_that_were_loaded(example: Example, tmp_path: Path, run: str) -> None:
    engine = TransformersEngine.load(example.model, EngineConfig(slots=2, max_len=32))
    manifest = version(example, tmp_path, 1, run)
    assert await engine.check_weights(1, 1) == ""  # nothing was loaded
    await engine.stage_weights(manifest.directory, manifest.digest)
    await engine.swap_weights(1)
    assert await engine.check_weights(1, 1) == ""
    name, weight = next(iter(engine._weights._tensors))
    with torch.inference_mode():
        weight.view(torch.int32)[0, 0] ^= 1
    found = {await engine.check_weights(seed, 1) for seed in range(60)}
    assert found == {"", name}  # one tensor each time, not always the same
    assert await engine.check_weights(1, 1 << 40) == name
    await engine.shutdown()


def flip(model: Model) -> None:
    """Flip one bit of one tensor in the engine."""
    engine = model.engine
    assert isinstance(engine, TransformersEngine)
    _, weight = next(iter(engine._weights._tensors))
    with torch.inference_mode():
        weight.view(torch.int32)[0, 0] ^= 1
