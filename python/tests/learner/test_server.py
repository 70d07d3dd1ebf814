"""The learner worker's service: calls can be repeated, and no step is made twice or skipped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from blake3 import blake3
from google.rpc import error_details_pb2, status_pb2

from rollout.buffer.v1.buffer_pb2 import Batch
from rollout.learner.v1 import learner_pb2 as pb
from rollout.learner.v1.learner_pb2_grpc import LearnerWorkerServiceStub
from rollout_testing.daemon import Daemon
from rollout_testing.run import Example, config, spec
from rollout_testing.worker import InProcess
from rollout_workers.weights import read_manifest, read_weights, weights_digest

from .batches import batch, trajectories

WIRE = {
    "loss", "reward/mean", "reward/std", "entropy", "mismatch/kl", "clip_fraction", "grad_norm", "learning_rate",
    "tokens", "samples", "length/mean", "zero_advantage_groups", "time/step", "time/forward", "time/backward",
    "time/optimizer", "time/publish", "samples_per_second", "tokens_per_second",
}  # fmt: skip


class Learner:
    """A learner worker and its stub."""

    def __init__(self, daemon: Daemon, example: Example, run: str, folder: Path, algorithm: str = "grpo") -> None:
        self.run, self.folder = run, folder
        settings = config(example, algorithm)
        settings.deterministic = True  # every step has a digest, also if it is not published
        self.made = InProcess(spec(daemon, settings, kind="learner", run=run, directory=folder / "run"))

    async def start(self) -> Learner:
        await self.made.start()
        return self

    async def call(self, method: str, request: Any) -> Any:
        assert self.made.channel is not None
        return await getattr(LearnerWorkerServiceStub(self.made.channel), method)(request, metadata=self.made.metadata)

    async def initialize(self, state: Path | None = None, step: int = 0) -> pb.InitializeResponse:
        request = pb.InitializeRequest(run_id=self.run, state_directory=str(state or ""), step=step)
        return await self.call("Initialize", request)

    def batch(self, step: int) -> Batch:
        return batch(self.run, step, trajectories(self.run, step, version=step - 1), self.folder / "segments")

    async def train(self, step: int, *, publish: bool = True, given: Batch | None = None) -> pb.TrainResult:
        assert self.made.channel is not None
        stub = LearnerWorkerServiceStub(self.made.channel)
        request = pb.TrainRequest(run_id=self.run, step=step, batch=given or self.batch(step), publish=publish)
        stream: Any = stub.Train(request, metadata=self.made.metadata)
        pieces = [piece async for piece in stream]
        assert all(piece.HasField("progress") for piece in pieces[:-1])
        return pieces[-1].result

    async def refused(self, work: Any) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await work
        trailers: dict[str, Any] = dict(caught.value.trailing_metadata() or ())
        info = error_details_pb2.ErrorInfo()
        status_pb2.Status.FromString(trailers["grpc-status-details-bin"]).details[0].Unpack(info)
        return caught.value.code(), info.reason

    async def status(self) -> pb.GetLearnerStatusResponse:
        return await self.call("GetLearnerStatus", pb.GetLearnerStatusRequest())


@pytest.fixture
async def learner(daemon: Daemon, example: Example, run: str, tmp_path: Path) -> AsyncIterator[Learner]:
    made = await Learner(daemon, example, run, tmp_path).start()
    yield made
    assert await made.made.stop() == 0


async def test_a_step_returns_all_its_fields(learner: Learner, example: Example) -> None:
    started = await learner.initialize()
    assert started.weights_digest == weights_digest(read_weights(example.model).items()).root
    result = await learner.train(1)
    assert result.step == 1 and result.weights_digest != started.weights_digest
    assert set(result.metrics) >= WIRE
    assert (result.metrics["samples"], result.metrics["reward/mean"]) == (32, 0.25)
    rows = [(c.index, c.sample, c.completion, c.reward) for c in result.completions]
    assert rows[0] == (0, 0, rows[0][2], 1.0) and rows[0][2].isdigit() and [row[1] for row in rows] == [0, 1, 2, 3]
    advantages = [c.advantage for c in result.completions]
    assert advantages[0] > 0 > advantages[1] and abs(sum(advantages)) < 1e-5
    folder = Path(result.weights.directory)
    assert folder == learner.folder / "run" / "weights" / "v000001"
    assert result.weights.digest == result.weights_digest == read_manifest(folder).digest
    assert weights_digest(read_weights(folder).items()).root == result.weights_digest
    assert (result.weights.run_id, result.weights.version, result.weights.dtype) == (learner.run, 1, "float32")
    names = [tensor.name for tensor in result.weights.tensors]
    assert names == sorted(names)
    status = await learner.status()
    assert (status.step, status.initialized, status.weights_digest) == (1, True, result.weights_digest)


async def test_repeated_calls_with_a_batch_return_the_same_result(learner: Learner) -> None:
    await learner.initialize()
    first = await learner.train(1, publish=False)
    assert not first.HasField("weights")
    again = await learner.train(1)
    assert again.weights_digest == first.weights_digest
    assert {k: v for k, v in again.metrics.items() if not k.startswith("time/")} == {
        k: v for k, v in first.metrics.items() if not k.startswith("time/")
    }
    assert again.weights.digest == first.weights_digest
    assert (await learner.status()).step == 1


async def test_two_callers_of_one_step_make_it_once(learner: Learner) -> None:
    await learner.initialize()
    one, other = await asyncio.gather(learner.train(1), learner.train(1))
    assert one == other
    assert (await learner.status()).step == 1


async def test_a_step_survives_the_disconnect_of_its_caller(learner: Learner) -> None:
    await learner.initialize()
    assert learner.made.channel is not None
    stub = LearnerWorkerServiceStub(learner.made.channel)
    request = pb.TrainRequest(run_id=learner.run, step=1, batch=learner.batch(1))
    call: Any = stub.Train(request, metadata=learner.made.metadata)
    call.cancel()
    result = await learner.train(1)
    assert result.step == 1 and (await learner.status()).step == 1


async def test_a_step_out_of_turn_is_rejected(learner: Learner) -> None:
    assert await learner.refused(learner.train(1)) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "LEARNER_NOT_INITIALIZED",
    )
    await learner.initialize()
    out_of_turn = (grpc.StatusCode.FAILED_PRECONDITION, "STEP_OUT_OF_TURN")
    assert await learner.refused(learner.train(2)) == out_of_turn
    await learner.train(1)
    other = learner.batch(1)
    other.batch_id = "blake3-" + "0" * 64
    assert await learner.refused(learner.train(1, given=other)) == out_of_turn
    invalid = (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert await learner.refused(learner.train(2, given=learner.batch(3))) == invalid
    assert (await learner.status()).step == 1
    await learner.train(2)


async def test_an_unusable_batch_does_not_change_the_step(learner: Learner) -> None:
    await learner.initialize()
    empty = learner.batch(1)
    del empty.samples[:]
    assert (await learner.refused(learner.train(1, given=empty)))[1] == "BAD_BATCH"
    assert (await learner.train(1)).step == 1


async def test_only_the_last_two_versions_are_kept(learner: Learner) -> None:
    await learner.initialize()
    await learner.call("PublishWeights", pb.PublishWeightsRequest(run_id=learner.run))
    for step in range(1, 4):
        await learner.train(step, publish=step != 2)
    root = learner.folder / "run" / "weights"
    async with asyncio.timeout(30):
        while sorted(path.name for path in root.glob("v*")) != ["v000001", "v000003"]:  # old ones are removed a moment later
            await asyncio.sleep(0.01)


async def test_a_restarted_learner_resumes_bit_for_bit(
    learner: Learner, daemon: Daemon, example: Example, run: str, tmp_path: Path
) -> None:
    await learner.initialize()
    for step in (1, 2):
        await learner.train(step, publish=False)
    state = tmp_path / "state"
    request = pb.SaveStateRequest(run_id=run, step=2, directory=str(state))
    saved = await learner.call("SaveState", request)
    assert saved.weights_digest == (await learner.status()).weights_digest
    for file in saved.files:
        assert file.digest == f"blake3-{blake3((state / file.path).read_bytes()).hexdigest()}"
        assert file.bytes == (state / file.path).stat().st_size
    assert {file.path for file in saved.files} == {str(path.relative_to(state)) for path in state.rglob("*") if path.is_file()}
    assert await learner.call("SaveState", request) == saved
    third = await learner.train(3, publish=False)

    other = await Learner(daemon, example, run, tmp_path / "again").start()
    loaded = await other.initialize(state, 2)
    assert (loaded.step, loaded.weights_digest) == (2, saved.weights_digest)
    again = await other.train(3, publish=False, given=learner.batch(3))
    assert again.weights_digest == third.weights_digest
    kept = await other.initialize(state, 2)
    assert (kept.step, kept.weights_digest) == (3, third.weights_digest), "it stands past the wanted step"
    await other.made.stop()


async def test_a_copied_state_is_written_while_the_next_step_is_made(learner: Learner, tmp_path: Path) -> None:
    await learner.initialize()
    await learner.train(1, publish=False)
    whole = await learner.call("SaveState", pb.SaveStateRequest(run_id=learner.run, step=1, directory=str(tmp_path / "whole")))
    request = pb.SaveStateRequest(run_id=learner.run, step=1, directory=str(tmp_path / "copied"))
    request.copied = True
    assert not (await learner.call("SaveState", request)).files
    await learner.train(2, publish=False)
    request.copied = False
    assert await learner.call("SaveState", request) == whole
    refused = await learner.refused(learner.call("SaveState", request))
    assert refused == (grpc.StatusCode.FAILED_PRECONDITION, "STEP_OUT_OF_TURN"), "it is not written twice"


async def test_a_state_of_another_step_is_rejected(learner: Learner, tmp_path: Path) -> None:
    await learner.initialize()
    request = pb.SaveStateRequest(run_id=learner.run, step=3, directory=str(tmp_path / "state"))
    refused = await learner.refused(learner.call("SaveState", request))
    assert refused == (grpc.StatusCode.FAILED_PRECONDITION, "STEP_OUT_OF_TURN")
    (tmp_path / "empty").mkdir()
    refused = await learner.refused(learner.initialize(tmp_path / "empty", 3))
    assert refused == (grpc.StatusCode.DATA_LOSS, "STATE_UNREADABLE")
    assert (await learner.status()).step == 0


async def test_calls_for_another_run_are_rejected(learner: Learner) -> None:
    refused = await learner.refused(learner.call("PublishWeights", pb.PublishWeightsRequest(run_id="another")))
    assert refused == (grpc.StatusCode.INVALID_ARGUMENT, "RUN_MISMATCH")


async def test_supervised_steps(daemon: Daemon, example: Example, run: str, tmp_path: Path) -> None:
    learner = await Learner(daemon, example, run, tmp_path, "sft").start()
    await learner.initialize()
    losses = [
        (await learner.train(step, publish=False, given=batch(run, step, trajectories(run, 1, size=1), tmp_path))).metrics["loss"]
        for step in range(1, 9)
    ]
    assert losses[-1] < losses[0]
    await learner.made.stop()
