"""The gRPC service of an inference worker (InferenceWorkerService)."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING

import grpc

from rollout.inference.v1 import inference_pb2 as pb
from rollout.inference.v1.inference_pb2_grpc import InferenceWorkerServiceServicer
from rollout.wait.v1.wait_pb2 import Wait
from rollout.weights.v1.weights_pb2 import EngineReceipt, WeightsReceipt
from rollout_workers.inference.evaluation import Evaluation, NoEvaluation
from rollout_workers.inference.generation import Generation
from rollout_workers.inference.in_flight import InFlight
from rollout_workers.inference.pipeline import ServedContext
from rollout_workers.inference.puller import Puller
from rollout_workers.inference.updates import Pauses, WeightsUpdates
from rollout_workers.rewards.rewards import Scorer
from rollout_workers.worker.lifecycle import Lifecycle
from rollout_workers.worker.status import RunMismatch

if TYPE_CHECKING:
    from rollout_workers.inference.policy_evaluation import PlayEvaluation
    from rollout_workers.inference.policy_serving import NoGeneration

log = logging.getLogger(__name__)

_SLOW_REWARD_SECONDS = 5.0


class InferenceServer(InferenceWorkerServiceServicer):
    """The servicer. ``worker.serving`` authenticates and validates requests before, and maps errors
    after."""

    def __init__(
        self,
        context: ServedContext,
        generation: Generation | NoGeneration,
        evaluation: Evaluation | PlayEvaluation | None,
        puller: Puller,
        in_flight: InFlight,
        lifecycle: Lifecycle,
        rewards: Scorer | None,
        updates: WeightsUpdates,
        pauses: Pauses,
    ) -> None:
        """evaluation, rewards: None if the plan has none."""
        self._who, self._engine, self._receipts = context.who, context.model.engine, context.receipts
        self._model, self._max_model_len = context.config.name, context.config.engine.max_model_len
        self._generation, self._evaluation = generation, evaluation
        self._puller, self._throughput, self._lifecycle = puller, context.throughput, lifecycle
        self._rewards, self._updates, self._pauses, self._in_flight = rewards, updates, pauses, in_flight

    async def LoadWeights(self, request: pb.LoadWeightsRequest, context: grpc.aio.ServicerContext) -> pb.LoadWeightsResponse:
        self._check_run(request.weights.run_id)
        receipt = await self._updates.load(request.weights, request.offers)
        return pb.LoadWeightsResponse(receipt=receipt, engines=[_engine_receipt(receipt)])

    async def StageWeights(self, request: pb.StageWeightsRequest, context: grpc.aio.ServicerContext) -> pb.StageWeightsResponse:
        self._check_run(request.weights.run_id)
        await self._updates.stage(request.weights, request.offers)
        return pb.StageWeightsResponse()

    async def CommitWeights(
        self, request: pb.CommitWeightsRequest, context: grpc.aio.ServicerContext
    ) -> pb.CommitWeightsResponse:
        self._check_run(request.run_id)
        receipt = await self._updates.commit(request.version, request.digest, drain=request.drain)
        return pb.CommitWeightsResponse(receipt=receipt)

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        async with aclosing(self._generation.generate(request)) as pieces:
            async for piece in pieces:
                if piece.finish_reason:
                    await self._add_digests(piece)
                yield piece

    async def Evaluate(
        self, request: pb.EvaluateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.EvaluateResponse]:
        self._check_run(request.run_id)
        if self._evaluation is None:
            raise NoEvaluation("the plan has no held-out rows or no reward", fix="set `data.eval` and `[reward]`")
        async with aclosing(self._evaluation.evaluate(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        prompts = await self._generation.tokenized(request.prompts)
        return pb.TokenizeResponse(prompts=[pb.TokenIds(ids=ids.tolist()) for ids in prompts], max_model_len=self._max_model_len)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(texts=self._generation.detokenized(request.prompts))

    async def AbortRequests(
        self, request: pb.AbortRequestsRequest, context: grpc.aio.ServicerContext
    ) -> pb.AbortRequestsResponse:
        await self._generation.abort(request.request_ids)
        return pb.AbortRequestsResponse()

    async def PauseEngine(self, request: pb.PauseEngineRequest, context: grpc.aio.ServicerContext) -> pb.PauseEngineResponse:
        await self._pauses.pause(request.max_seconds)
        return pb.PauseEngineResponse()

    async def ResumeEngine(self, request: pb.ResumeEngineRequest, context: grpc.aio.ServicerContext) -> pb.ResumeEngineResponse:
        await self._pauses.resume()
        return pb.ResumeEngineResponse()

    async def GetInferenceStatus(
        self, request: pb.GetInferenceStatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetInferenceStatusResponse:
        stats = self._engine.stats()
        samples, tokens = self._throughput.rates()
        return pb.GetInferenceStatusResponse(
            receipt=self._receipts.current,
            active=stats.active,
            slots=stats.slots,
            queued=stats.queued,
            samples=self._throughput.samples,
            tokens=self._throughput.tokens,
            samples_per_second=samples,
            tokens_per_second=tokens,
            activity=self._activity(stats.paused),
            process_id=self._who.process,
            model=self._model,
            max_model_len=self._max_model_len,
            reward_retries=self._rewards.retries if self._rewards else 0,
            engines=[_engine_receipt(self._receipts.current)],
            staged_version=self._receipts.staged,
            reserved=self._who.reserved,
            paused=stats.paused or self._updates.draining,
            waits=await self._waits(stats.paused) if request.in_flight else (),
        )

    async def _waits(self, paused: bool) -> list[Wait]:
        """What the groups wait for, and that the engine samples nothing."""
        waits = self._in_flight.waits(await self._in_flight.looks())
        if paused:
            restart = f"`kill {os.getpid()}` on its host"
            waits.append(
                Wait(
                    owner="learner-controller",
                    reason="ENGINE_PAUSED",
                    evidence=f"{self._who.worker} samples nothing: its engine is {self._activity(paused)}",
                    fix="none is needed during an update of the weights; else call ResumeEngine, or restart the worker: "
                    + restart,
                    subjects=[self._who.worker],
                )
            )
        elif self._updates.draining:
            waits.append(
                Wait(
                    owner=self._who.worker,
                    reason="ENGINE_DRAINS",
                    evidence=f"{self._who.worker} starts no sample: it is {self._activity(paused)}",
                    fix="it ends by itself",
                    subjects=[self._who.worker],
                )
            )
        return waits

    async def _add_digests(self, piece: pb.GenerateResponse) -> None:
        """Add the digests of the weights that sampled the completion. Raises
        ``CurrentWeightsMismatch``."""
        await self._receipts.settled()
        for holder in (piece, *piece.segments):
            for span in holder.version_spans:
                span.digest = self._receipts.digest(span.version)

    def _activity(self, paused: bool) -> str:
        if self._lifecycle.leaving:
            return "draining"
        if self._updates.draining:
            stats = self._engine.stats()
            left = f"finishing {stats.active + stats.queued} samples before it loads weights version {self._receipts.staged}"
            return left + ("; paused (ResumeEngine)" if paused else "")
        if paused:
            return "paused (ResumeEngine)"
        if self._who.reserved:
            kept = f"weights version {self._receipts.version} (eval.workers)"
            return (
                f"evaluating {kept}" if self._evaluation and self._evaluation.running else f"reserved for evaluations, at {kept}"
            )
        if self._puller.active:
            waited = self._rewards.waiting_seconds if self._rewards else 0.0
            late = f"; the reward has not answered for {waited:.0f} s" if waited > _SLOW_REWARD_SECONDS else ""
            return f"sampling {self._puller.active} groups{late}"
        if self._puller.waiting:
            return f"{self._puller.waiting} groups wait for newer weights (learner-controller)"
        return "waiting for work (scheduler)"

    def _check_run(self, run: str) -> None:
        if run != self._who.run:
            raise RunMismatch(f"this worker serves {self._who.run}, not {run}", metadata={"run": self._who.run})


def _engine_receipt(receipt: WeightsReceipt) -> EngineReceipt:
    """The receipt of the engine, for the list of the worker's engines."""
    return EngineReceipt(engine="engine-0", version=receipt.version, digest=receipt.digest, verify=receipt.verify)
