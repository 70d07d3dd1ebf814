"""The calls of an inference worker, with a real engine and a small model."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2
from numpy.typing import NDArray

from rollout.inference.v1 import inference_pb2 as pb
from rollout.inference.v1.inference_pb2_grpc import InferenceWorkerServiceStub
from rollout.trajectory.v1.trajectory_pb2 import OUTCOME_INFRA_FAILED
from rollout_testing.daemon import Daemon
from rollout_testing.run import Example, config, spec
from rollout_testing.waiting import until
from rollout_testing.worker import InProcess
from rollout_workers.data.prompts import Text

LIMIT = 32


class Caller:
    """A client of the worker, with the token."""

    def __init__(self, made: InProcess) -> None:
        self.made = made
        assert made.channel is not None
        self._stub = InferenceWorkerServiceStub(made.channel)

    async def call(self, method: str, request: Any) -> Any:
        return await getattr(self._stub, method)(request, metadata=self.made.metadata)

    async def stream(self, method: str, request: Any) -> list[Any]:
        return [piece async for piece in getattr(self._stub, method)(request, metadata=self.made.metadata)]

    async def generate(self, *prompts: pb.Prompt, n: int = 1, stream: bool = False, name: str = "a", **params: Any) -> list:
        request = pb.GenerateRequest(request_id=name, prompts=prompts, n=n, stream=stream, params=pb.SamplingParams(**params))
        return await self.stream("Generate", request)


@pytest.fixture
async def caller(daemon: Daemon, example: Example, run: str) -> AsyncIterator[Caller]:
    run_config = config(example, engine={"slots": 16, "max_model_len": LIMIT})
    made = await InProcess(spec(daemon, run_config, run=run)).start()
    yield Caller(made)
    await made.stop()


def text(words: str) -> pb.Prompt:
    return pb.Prompt(text=words)


def reason_of(error: grpc.aio.AioRpcError) -> tuple[grpc.StatusCode, str]:
    trailers: dict[str, Any] = dict(error.trailing_metadata() or ())
    packed = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    info = error_details_pb2.ErrorInfo()
    packed.details[0].Unpack(info)
    return error.code(), info.reason


async def test_prompt_logprobs_are_returned_on_request(caller: Caller) -> None:
    request = pb.GenerateRequest(
        request_id="p", prompts=[text("1+1="), text("22+2=")], n=2, prompt_logprobs=True, params=pb.SamplingParams(max_tokens=1)
    )
    pieces = await caller.stream("Generate", request)
    assert len(pieces) == 4
    for piece in pieces:
        assert "".join(piece.prompt_texts).endswith(("1+1=", "22+2=")[piece.prompt])
        assert len(piece.prompt_texts) == len(piece.prompt_logprobs) == piece.prompt_tokens
        assert piece.prompt_logprobs[0] == 0 and max(piece.prompt_logprobs[1:]) < 0
    [silent] = await caller.generate(text("1+1="), max_tokens=1)
    assert not silent.prompt_logprobs and not silent.prompt_texts


async def test_tokenize_accepts_text_chat_and_tokens(caller: Caller) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="1+1")])
    tokens = pb.TokenIds(ids=[5, 6])
    request = pb.TokenizeRequest(prompts=[text("1+1="), pb.Prompt(chat=chat), pb.Prompt(tokens=tokens)])
    answer = await caller.call("Tokenize", request)
    one, two, three = (list(prompt.ids) for prompt in answer.prompts)
    assert (len(one), two, three) == (4, one[:3], [5, 6])
    assert answer.max_model_len == LIMIT


async def test_detokenize_inverts_tokenize(caller: Caller) -> None:
    ids = (await caller.call("Tokenize", pb.TokenizeRequest(prompts=[text("1+1=")]))).prompts
    [found] = (await caller.call("Detokenize", pb.DetokenizeRequest(prompts=ids))).texts
    assert found.endswith("1+1=")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await caller.call("Detokenize", pb.DetokenizeRequest(prompts=[pb.TokenIds(ids=[9999])]))
    assert reason_of(caught.value) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PROMPT")


async def test_a_session_continues_its_tokens(caller: Caller) -> None:
    def request(name: str, known: int, *messages: tuple[str, str]) -> pb.GenerateRequest:
        chat = pb.Chat(messages=[pb.ChatMessage(role=role, content=content) for role, content in messages])
        session = pb.SessionState(session_id="ses-1", known=known)
        prompts, params = [pb.Prompt(chat=chat)], pb.SamplingParams(max_tokens=2)
        return pb.GenerateRequest(request_id=name, prompts=prompts, n=1, params=params, session=session, parse=True)

    [one] = await caller.stream("Generate", request("s1", 0, ("user", "1+1=")))
    assert len(one.segments) == 2 and one.HasField("delta")
    history = ("user", "1+1="), ("assistant", one.delta.content), ("user", "2+2=")
    [two] = await caller.stream("Generate", request("s2", 2, *history))
    path = [*one.prompt_token_ids, *one.token_ids]
    assert list(two.prompt_token_ids)[: len(path)] == path and two.segments[0].parent_segment_id == one.segments[1].segment_id
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await caller.stream("Generate", request("s3", 9, *history))
    assert reason_of(caught.value) == (grpc.StatusCode.FAILED_PRECONDITION, "SESSION_SEGMENTS_MISSING")


async def test_a_request_without_streaming_returns_one_message_per_completion(caller: Caller) -> None:
    pieces = await caller.generate(text("1+1="), text("22+2="), n=3, max_tokens=4, seed=1)
    assert sorted((piece.prompt, piece.sample) for piece in pieces) == [(p, s) for p in (0, 1) for s in (0, 1, 2)]
    for piece in pieces:
        count = len(piece.token_ids)
        assert 1 <= count <= 4
        assert count == len(piece.logprobs) == len(piece.raw_logprobs)
        assert piece.finish_reason == ("length" if count == 4 and piece.token_ids[-1] != 1 else "stop")
        assert piece.prompt_tokens == len(piece.prompt_token_ids) == (4, 5)[piece.prompt]
        assert [(s.version, s.start, s.end) for s in piece.version_spans] == [(0, 0, count)]


async def test_the_pieces_of_a_stream_add_up_to_the_completion(caller: Caller) -> None:
    [whole] = await caller.generate(text("1+1="), max_tokens=12, seed=7)
    pieces = await caller.generate(text("1+1="), max_tokens=12, seed=7, stream=True)
    assert len(pieces) > 2
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [i for piece in pieces for i in piece.token_ids] == list(whole.token_ids)
    assert [lp for piece in pieces for lp in piece.logprobs] == pytest.approx(list(whole.logprobs), abs=1e-4)
    assert [piece.finish_reason for piece in pieces[:-1]] == [""] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == whole.finish_reason
    assert {piece.weights_version for piece in pieces[:-1]} == {whole.version_spans[-1].version}
    assert all(piece.HasField("weights_version") for piece in pieces[:-1])


async def test_a_seed_repeats_the_completion(caller: Caller) -> None:
    async def tokens(**params: Any) -> list[list[int]]:
        pieces = await caller.generate(text("1+1="), n=4, max_tokens=8, **params)
        return [list(piece.token_ids) for piece in sorted(pieces, key=lambda piece: piece.sample)]

    first = await tokens(seed=3)
    assert await tokens(seed=3) == first != await tokens(seed=4)
    assert len({tuple(sample) for sample in first}) > 1
    assert await tokens() != await tokens()


async def test_a_stop_text_ends_the_completion_and_is_not_returned(caller: Caller) -> None:
    [whole] = await caller.generate(text("1+1="), max_tokens=12, seed=7)
    stop = whole.text[3]
    [piece] = await caller.generate(text("1+1="), max_tokens=12, seed=7, stop=[stop])
    assert piece.text == whole.text[: whole.text.index(stop)]
    assert piece.finish_reason == "stop"


async def test_missing_parameters_have_the_values_of_the_run(caller: Caller) -> None:
    [piece] = await caller.generate(text("1+1="), seed=5)
    assert len(piece.token_ids) <= 8  # the run's max_tokens
    [piece] = await caller.generate(text("1" * 28), seed=5)
    assert len(piece.token_ids) <= LIMIT - 28


@pytest.mark.parametrize(
    ("prompt", "params", "reason"),
    [
        (text("1" * LIMIT), {}, "CONTEXT_OVERFLOW"),
        (text("1+1="), {"max_tokens": LIMIT}, "CONTEXT_OVERFLOW"),
        (text(""), {}, "INVALID_PROMPT"),
        (pb.Prompt(tokens=pb.TokenIds(ids=[5, 9999])), {}, "INVALID_PROMPT"),
        (pb.Prompt(tokens=pb.TokenIds(ids=[5, 2**32 - 1])), {}, "INVALID_PROMPT"),
        (text("a"), {"temperature": -0.5}, "INVALID_REQUEST"),
        (text("1" * 1_000_000), {}, "CONTEXT_OVERFLOW"),
    ],
)
async def test_an_invalid_request_is_rejected_before_sampling(
    caller: Caller, prompt: pb.Prompt, params: dict[str, Any], reason: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await caller.generate(prompt, **params)
    assert reason_of(caught.value) == (grpc.StatusCode.INVALID_ARGUMENT, reason)


async def test_a_long_prompt_does_not_delay_other_requests(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, answered = threading.Event(), threading.Event()
    encode = Text.encode

    def slow(self: Text, texts: Sequence[str], *, special: bool = True) -> list[NDArray[np.int32]]:
        if any(len(one) > 20_000 for one in texts):
            begun.set()
            assert answered.wait(10), "no request is answered while a long prompt is tokenized"
        return encode(self, texts, special=special)

    monkeypatch.setattr(Text, "encode", slow)
    long = asyncio.create_task(caller.call("Tokenize", pb.TokenizeRequest(prompts=[text("1" * 30_000)])))
    await asyncio.to_thread(begun.wait, 10)
    [short] = await caller.generate(text("1+1="), max_tokens=1)
    answered.set()
    assert short.token_ids and len((await long).prompts[0].ids) == 30_000


async def test_pause_abort_resume(caller: Caller) -> None:
    await caller.call("PauseEngine", pb.PauseEngineRequest())
    await caller.call("PauseEngine", pb.PauseEngineRequest())
    running = asyncio.create_task(caller.generate(text("1+1="), n=2, name="long", max_tokens=20))
    status = await until(lambda: _status(caller, lambda s: s.queued + s.active))
    assert status.activity == "paused (ResumeEngine)" and status.paused
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await caller.generate(text("1+1="), name="long")
    assert reason_of(caught.value) == (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST")
    await caller.call("AbortRequests", pb.AbortRequestsRequest(request_ids=["long", "unknown"]))
    await caller.call("ResumeEngine", pb.ResumeEngineRequest())
    assert {piece.finish_reason for piece in await running} == {"abort"}
    assert len(await caller.generate(text("1+1="), name="long")) == 1


async def test_a_disconnect_frees_the_slots_of_the_request(caller: Caller) -> None:
    assert caller.made.channel is not None
    stub = InferenceWorkerServiceStub(caller.made.channel)
    await caller.call("PauseEngine", pb.PauseEngineRequest())
    request = pb.GenerateRequest(request_id="x", prompts=[text("1+1=")], n=4)
    call = stub.Generate(request, metadata=caller.made.metadata)
    await until(lambda: _status(caller, lambda s: s.queued + s.active))
    call.cancel()
    await caller.call("ResumeEngine", pb.ResumeEngineRequest())
    await until(lambda: _status(caller, lambda s: not s.queued + s.active))


async def test_evaluate_scores_rows_in_order(caller: Caller, example: Example, run: str) -> None:
    request = pb.EvaluateRequest(run_id=run, version=0, max_prompts=150, temperature=0, seed=1)
    chunks = await caller.stream("Evaluate", request)
    samples = [sample for chunk in chunks for sample in chunk.samples]
    assert [sample.row for sample in samples] == list(range(150))
    rows = [json.loads(line) for line in (example.data / "eval.jsonl").read_text().splitlines()[:150]]
    for sample, row in zip(samples, rows, strict=True):
        assert sample.prompt == row["prompt"]
        assert sample.reward == float(sample.completion == row["answer"])
        assert sample.outcome != OUTCOME_INFRA_FAILED
    assert await caller.stream("Evaluate", request) == chunks


async def test_the_parts_of_an_evaluation_are_its_rows(caller: Caller, run: str) -> None:
    request = pb.EvaluateRequest(run_id=run, version=0, max_prompts=10, temperature=0, seed=1)
    whole = [sample for chunk in await caller.stream("Evaluate", request) for sample in chunk.samples]
    parts: list[pb.EvalSample] = []
    for part in range(3):
        request.parts, request.part = 3, part
        samples = [sample for chunk in await caller.stream("Evaluate", request) for sample in chunk.samples]
        assert [sample.row for sample in samples] == list(range(part, 10, 3))
        parts += samples
    assert sorted(parts, key=lambda sample: sample.row) == whole
    request.max_prompts, request.parts, request.part = 2, 3, 2
    assert await caller.stream("Evaluate", request) == []


async def test_suites_have_their_own_rows_samples_and_rewards(daemon: Daemon, example: Example, run: str, tmp_path: Path) -> None:
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+1=", "page": n // 2}) + "\n" for n in range(4)))
    run_config = config(example, engine={"slots": 16, "max_model_len": LIMIT}, eval={"every_steps": 1})
    suite = run_config.eval.suites["sums"]
    suite.data, suite.cluster = str(tmp_path / "sums.jsonl"), "page"
    made_of = spec(daemon, run_config, run=run)
    own = made_of.suites["sums"]
    own.CopyFrom(run_config)
    own.sampling.max_tokens = 2
    own.reward.ClearField("plugin")
    own.reward.expression = "double(size(completion)) + 10.0"
    made = await InProcess(made_of).start()
    try:
        caller = Caller(made)
        request = pb.EvaluateRequest(run_id=run, version=0, temperature=1, seed=1, suite="sums", samples=3)
        samples = [sample for chunk in await caller.stream("Evaluate", request) for sample in chunk.samples]
        assert [(sample.row, sample.sample, sample.cluster) for sample in samples] == [
            (row, number, str(row // 2)) for row in range(4) for number in range(3)
        ]
        assert {sample.prompt for sample in samples} == {f"{n}+1=" for n in range(4)}
        assert all(sample.reward == len(sample.completion) + 10 for sample in samples)
        assert len({sample.completion for sample in samples}) > 4, "the samples of a row differ"
        request.parts, request.part = 2, 1
        odd = [sample for chunk in await caller.stream("Evaluate", request) for sample in chunk.samples]
        assert odd == [sample for sample in samples if sample.row % 2]
        held_out = pb.EvaluateRequest(run_id=run, version=0, max_prompts=4, seed=1)
        scored = [sample for chunk in await caller.stream("Evaluate", held_out) for sample in chunk.samples]
        assert len(scored) == 4 and all(sample.reward < 10 and not sample.cluster for sample in scored)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await caller.stream("Evaluate", pb.EvaluateRequest(run_id=run, suite="words"))
        assert reason_of(caught.value)[1] == "NO_EVALUATION"
    finally:
        await made.stop()


async def test_an_evaluation_needs_the_current_version(caller: Caller, run: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await caller.stream("Evaluate", pb.EvaluateRequest(run_id=run, version=3))
    assert reason_of(caught.value) == (grpc.StatusCode.FAILED_PRECONDITION, "WEIGHTS_VERSION_MISMATCH")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await caller.stream("Evaluate", pb.EvaluateRequest(run_id="another"))
    assert reason_of(caught.value) == (grpc.StatusCode.INVALID_ARGUMENT, "RUN_MISMATCH")


async def test_the_status_has_version_and_activity(caller: Caller) -> None:
    status = await _status(caller, lambda _: True)
    assert status.receipt.digest.startswith("blake3-")
    assert (status.slots, status.max_model_len, status.model) == (16, LIMIT, "addition-test")
    assert status.activity == "waiting for work (scheduler)"
    assert status.process_id == caller.made.who.process


async def _status(caller: Caller, wanted: Any) -> Any:
    status = await caller.call("GetInferenceStatus", pb.GetInferenceStatusRequest())
    return status if wanted(status) else None


def test_the_fast_path_decodes_like_the_tokenizer(text: Text) -> None:
    ids = np.arange(len(text.tokenizer), dtype=np.int32)
    assert text.decode([ids, ids[:0]]) == [text.tokenizer.decode(ids.tolist(), skip_special_tokens=True), ""]
