"""From work items to trajectories, with an engine that has no model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import crc32c
import numpy as np
import pytest

from rollout.config.v1.run_config_pb2 import RunConfig
from rollout.inference.v1 import inference_pb2
from rollout.inference.v1.inference_pb2_grpc import InferenceWorkerServiceStub
from rollout.trajectory.v1 import trajectory_pb2 as pb
from rollout_testing.daemon import Daemon
from rollout_testing.engine import ScriptedEngine
from rollout_testing.run import Example, RunStreams, by_key, config, prompt_group, spec, trajectory
from rollout_testing.services import BufferDouble, Host, StorageDouble, buffer_double, storage_double
from rollout_testing.waiting import until
from rollout_testing.worker import InProcess
from rollout_workers.data.prompts import Text
from rollout_workers.engines.base import GroupRequest
from rollout_workers.inference.model import Model
from rollout_workers.worker.heartbeat import Heartbeat


@pytest.fixture
def engine(text: Text) -> ScriptedEngine:
    """Answers every prompt with the right sum in sample 0, and with the sample's number
    otherwise."""

    def answer(request: GroupRequest, sample: int) -> list[int]:
        [prompt] = text.decode([np.array(request.prompt_ids)])
        right = str(sum(int(number) for number in prompt.rstrip("=").split("+")))
        return [*text.encode([right if sample == 0 else str(sample)])[0].tolist(), text.eos_id or 0]

    return ScriptedEngine(answer)


@pytest.fixture
async def host(daemon: Daemon) -> AsyncIterator[tuple[BufferDouble, StorageDouble]]:
    """The buffer and the storage service."""
    hosted, buffer, storage = Host(daemon), buffer_double(), storage_double()
    hosted.buffer(buffer)
    hosted.storage(storage)
    await hosted.start()
    yield buffer, storage
    await hosted.stop()


async def worker(daemon: Daemon, run_config: RunConfig, run: str, engine: ScriptedEngine, text: Text) -> InProcess:
    return await InProcess(spec(daemon, run_config, run=run), model=Model(engine, text)).start()


async def test_a_group_becomes_trajectories(
    daemon: Daemon, example: Example, run: str, streams: RunStreams, engine: ScriptedEngine, text: Text
) -> None:
    made = await worker(daemon, config(example), run, engine, text)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await streams.issue([prompt_group(7, b'{"prompt": "17+25=", "answer": "42"}', run=run)], {"traceparent": parent})
    puller = await streams.js.pull_subscribe_bind("buffer", stream=f"TRAJ_{run}")
    [message] = await puller.fetch(1, timeout=60)
    assert message.headers and message.headers["traceparent"] == parent
    envelopes = pb.TrajectoryBatch.FromString(message.data).trajectories
    assert len(envelopes) == 4
    for number, envelope in enumerate(envelopes):
        assert envelope.crc32c == crc32c.crc32c(envelope.payload)
        sample = trajectory(envelope)
        completion = "42" if number == 0 else str(number)
        assert sample.key == envelope.header.key == pb.TrajectoryKey(run_id=run, index=7, sample=number)
        assert (sample.prompt, sample.completion, sample.prompt_tokens) == ("17+25=", completion, 6)
        ids = np.frombuffer(sample.token_ids, "<i4")
        assert text.decode([ids]) == [f"17+25={completion}"]
        count = len(completion) + 1
        assert np.frombuffer(sample.loss_mask, np.uint8).tolist() == [0] * 6 + [1] * count
        assert np.frombuffer(sample.logprobs, "<f4").tolist() == [0.0] * 6 + [-0.5] * count
        assert np.frombuffer(sample.raw_logprobs, "<f4").tolist() == [0.0] * 6 + [-0.25] * count
        assert [(s.version, s.start, s.end) for s in sample.version_spans] == [(0, 0, count)]
        assert sample.reward == envelope.header.reward == float(number == 0)
        assert sample.outcome == envelope.header.outcome == pb.OUTCOME_COMPLETED
        header = envelope.header
        assert (header.group_size, header.tokens, header.completion_tokens) == (4, 6 + count, count)
        assert (header.min_version, header.max_version, header.row, header.worker_id) == (0, 0, 7, "inference-0")
        assert header.receipt.digest == engine.held
    await until(lambda: _left(streams, 0))
    assert await made.stop() == 0


async def test_a_group_waits_for_the_weights_that_it_requires(
    daemon: Daemon, example: Example, run: str, streams: RunStreams, engine: ScriptedEngine, text: Text
) -> None:
    made = await worker(daemon, config(example), run, engine, text)
    rows = example.rows(3)
    await streams.issue([prompt_group(i, rows[i], min_version=i, run=run) for i in range(3)])
    assert {envelope.header.key.index for envelope in await streams.collect(4)} == {0}
    from rollout.inference.v1.inference_pb2 import LoadWeightsRequest
    from rollout.inference.v1.inference_pb2_grpc import InferenceWorkerServiceStub
    from rollout.weights.v1.weights_pb2 import WeightsManifest

    assert made.channel is not None
    stub = InferenceWorkerServiceStub(made.channel)
    for version in (1, 2):
        digest = "blake3-" + str(version) * 64
        engine.digests[f"/v{version}"] = digest
        manifest = WeightsManifest(run_id=run, version=version, digest=digest, directory=f"/v{version}")
        await stub.LoadWeights(LoadWeightsRequest(weights=manifest), metadata=made.metadata)
        envelopes = await streams.collect(4)
        assert {envelope.header.key.index for envelope in envelopes} == {version}
        assert {envelope.header.receipt.digest for envelope in envelopes} == {digest}
        assert {(e.header.min_version, e.header.max_version) for e in envelopes} == {(version, version)}
    await made.stop()


async def test_only_missing_samples_of_a_redelivered_group_are_sampled(
    daemon: Daemon, example: Example, run: str, streams: RunStreams, engine: ScriptedEngine, text: Text,
    host: tuple[BufferDouble, StorageDouble],
) -> None:  # fmt: skip
    buffer, _ = host
    buffer.missing = {(0, 0): [1, 3], (0, 1): []}
    rows = example.rows(3)
    groups = [prompt_group(i, rows[i], run=run) for i in range(3)]
    await streams.issue(groups)
    puller = await streams.js.pull_subscribe_bind("workers", stream=f"WORK_{run}")
    for message in await puller.fetch(3, timeout=60):
        await message.nak()
    await puller.unsubscribe()
    made = await worker(daemon, config(example), run, engine, text)
    envelopes = await streams.collect(6)
    assert sorted((e.header.key.index, e.header.key.sample) for e in envelopes) == [
        (0, 1), (0, 3), (2, 0), (2, 1), (2, 2), (2, 3),
    ]  # fmt: skip
    seeds = {request.request_id: request.seeds for request in engine.requests}
    assert seeds["0/0/0"] == (groups[0].seeds[1], groups[0].seeds[3])
    assert sorted(buffer.asked) == [(0, 0), (0, 1), (0, 2)]
    assert buffer.metadata[0]["authorization"] == f"Bearer {daemon.token}"
    await until(lambda: _left(streams, 0))
    await made.stop()


async def test_without_a_buffer_a_redelivered_group_is_sampled_completely(
    daemon: Daemon, example: Example, run: str, streams: RunStreams, engine: ScriptedEngine, text: Text
) -> None:
    await streams.issue([prompt_group(0, example.rows(1)[0], run=run)])
    puller = await streams.js.pull_subscribe_bind("workers", stream=f"WORK_{run}")
    for message in await puller.fetch(1, timeout=60):
        await message.nak()
    await puller.unsubscribe()
    made = await worker(daemon, config(example), run, engine, text)
    assert len(await streams.collect(4)) == 4
    await made.stop()


async def test_a_large_payload_is_stored_and_referenced(
    daemon: Daemon, example: Example, run: str, streams: RunStreams, text: Text,
    host: tuple[BufferDouble, StorageDouble],
) -> None:  # fmt: skip
    engine = ScriptedEngine(lambda request, sample: [5] * (30_000 if sample == 2 else 3))
    made = await worker(daemon, config(example), run, engine, text)
    await streams.issue([prompt_group(0, example.rows(1)[0], run=run)])
    envelopes = {e.header.key.sample: e for e in await streams.collect(4)}
    assert [bool(envelopes[sample].payload) for sample in range(4)] == [True, True, False, True]
    stored = host[1].artifacts[envelopes[2].payload_ref]
    assert crc32c.crc32c(stored) == envelopes[2].crc32c
    assert len(np.frombuffer(pb.Trajectory.FromString(stored).token_ids, "<i4")) == 30_006
    await made.stop()


async def test_messages_are_not_larger_than_the_server_accepts(
    daemon: Daemon, example: Example, run: str, streams: RunStreams, text: Text
) -> None:
    engine = ScriptedEngine(lambda request, sample: [5] * 15_000)  # 195 kB each and 48 of them, which is more than one message
    made = await worker(daemon, config(example), run, engine, text)
    rows = example.rows(12)
    await streams.issue([prompt_group(i, rows[i], run=run) for i in range(12)])
    assert len(by_key(await streams.collect(48))) == 48
    await made.stop()


@pytest.mark.parametrize(
    ("body", "reason", "seconds"),
    [
        ("raise ValueError('no')", "REWARD_RAISED", 60.0),
        ("return [float('nan')] * len(samples)", "REWARD_BAD_RESULT", 60.0),
        ("return 1.0", "REWARD_BAD_RESULT", 60.0),
        ("import time; time.sleep(600)", "REWARD_TIMEOUT", 0.5),
        ("import os; os._exit(9)", "REWARD_RAISED", 60.0),
    ],
)
async def test_a_failed_reward_is_not_a_reward_of_zero(
    daemon: Daemon, example: Example, run: str, streams: RunStreams, engine: ScriptedEngine, text: Text,
    tmp_path: Path, body: str, reason: str, seconds: float,
) -> None:  # fmt: skip
    plugin = tmp_path / "reward.py"
    plugin.write_text(f"def score(samples):\n    {body}\n")
    reward = {"plugin": f"{plugin}:score", "timeout_seconds": seconds, "retries": 0}
    made = await worker(daemon, config(example, reward=reward), run, engine, text)
    await streams.issue([prompt_group(0, example.rows(1)[0], run=run)])
    envelopes = await streams.collect(4)
    assert {(e.header.outcome, e.header.reason) for e in envelopes} == {(pb.OUTCOME_INFRA_FAILED, reason)}
    for envelope in envelopes:
        sample = trajectory(envelope)
        assert (sample.outcome, sample.reason) == (pb.OUTCOME_INFRA_FAILED, reason)
        assert not any(sample.loss_mask)
        assert sample.completion
    await until(lambda: _left(streams, 0))
    await made.stop()


async def test_a_broken_row_fails_with_its_reason(
    daemon: Daemon, example: Example, run: str, streams: RunStreams, engine: ScriptedEngine, text: Text
) -> None:
    made = await worker(daemon, config(example), run, engine, text)
    await streams.issue([prompt_group(0, b'{"question": 1}', run=run), prompt_group(1, example.rows(1)[0], run=run)])
    envelopes = await streams.collect(8)
    reasons = {e.header.key.index: e.header.reason for e in envelopes}
    assert reasons == {0: "PROMPT_INVALID", 1: ""}
    await made.stop()


async def test_draining_finishes_active_groups_and_gives_back_the_others(
    daemon: Daemon, example: Example, run: str, streams: RunStreams, engine: ScriptedEngine, text: Text
) -> None:
    made = await worker(daemon, config(example), run, engine, text)
    await engine.pause()
    rows = example.rows(4)
    await streams.issue([prompt_group(i, rows[i], min_version=i // 2, run=run) for i in range(4)])
    await until(lambda: len(engine.requests) == 2)
    await streams.redeliver_after(600)
    stopping = made.stop()
    made.lifecycle.drain()
    await engine.resume()
    assert await stopping == 0
    assert {key[1] for key in by_key(await streams.collect(8))} == {0, 1}
    assert await streams.work_left() == 2
    puller = await streams.js.pull_subscribe_bind("workers", stream=f"WORK_{run}")
    again = [message for _ in range(2) for message in await puller.fetch(1, timeout=60)]  # at once instead of after the ack wait
    assert len(again) == 2


async def test_draining_waits_longer_for_requests_than_for_groups(
    daemon: Daemon, example: Example, run: str, streams: RunStreams, engine: ScriptedEngine, text: Text
) -> None:
    made = await worker(daemon, config(example), run, engine, text)
    assert made.channel is not None
    await engine.pause()
    await streams.issue([prompt_group(0, example.rows(1)[0], run=run)])
    request = inference_pb2.GenerateRequest(request_id="a", prompts=[inference_pb2.Prompt(text="17+25=")], n=1)
    stub = cast(Any, InferenceWorkerServiceStub(made.channel))
    asking = stub.Generate(request, metadata=made.metadata)
    answer = asyncio.create_task(asking.read())
    await until(lambda: len(engine.requests) == 2)
    made.lifecycle.drain()
    await asyncio.sleep(3)  # groups have 2 s
    await engine.resume()
    assert (await answer).finish_reason == "stop"
    assert await made.stop() == 0
    assert await streams.work_left() == 1


async def test_rows_become_samples_for_supervised_training(
    daemon: Daemon, example: Example, run: str, streams: RunStreams, text: Text
) -> None:
    engine = ScriptedEngine(lambda request, sample: [])
    made = await worker(daemon, config(example, "sft"), run, engine, text)
    rows = example.rows(64)
    await streams.issue([prompt_group(i, rows[i], group_size=1, run=run) for i in range(64)])
    envelopes = await streams.collect(64)
    assert engine.requests == []
    for envelope in envelopes:
        row = json.loads(rows[envelope.header.key.index])
        sample = trajectory(envelope)
        assert text.decode([np.frombuffer(sample.token_ids, "<i4")]) == [row["prompt"] + row["answer"]]
        length = len(row["prompt"]) + len(row["answer"]) + 1
        mask = np.frombuffer(sample.loss_mask, np.uint8)
        assert mask.tolist() == [0] * len(row["prompt"]) + [1] * (length - len(row["prompt"]))
        assert len(sample.logprobs) == 4 * length and not any(sample.logprobs)
        assert not sample.version_spans and not envelope.header.HasField("receipt")
        assert envelope.header.outcome == pb.OUTCOME_COMPLETED
    await until(lambda: _left(streams, 0))
    await made.stop()


@pytest.mark.parametrize(
    ("algorithm", "fields", "row", "wanted"),
    [
        pytest.param(
            "reward_model",
            {"chosen_field": "good", "rejected_field": "bad", "margin_field": "by"},
            {"good": "42", "bad": "7", "by": 0.5},
            [("42", 0.5), ("7", 0.0)],
            id="a pair",
        ),
        pytest.param(
            "kto", {"completion_field": "said", "label_field": "ok"}, {"said": "42", "ok": True}, [("42", 1.0)], id="desirable"
        ),
        pytest.param(
            "kto", {"completion_field": "said", "label_field": "ok"}, {"said": "7", "ok": False}, [("7", 0.0)], id="other"
        ),
    ],
)
async def test_rows_become_preference_pairs(
    daemon: Daemon, example: Example, run: str, streams: RunStreams, text: Text,
    algorithm: str, fields: dict[str, str], row: dict[str, object], wanted: list[tuple[str, float]],
) -> None:  # fmt: skip
    engine = ScriptedEngine(lambda request, sample: [])
    made = await worker(daemon, config(example, algorithm, data=fields), run, engine, text)
    prompt = "17+25="
    rows = [json.dumps({"prompt": prompt, **row}).encode(), b'{"prompt": "1+1="}']
    await streams.issue([prompt_group(i, rows[i], group_size=len(wanted), run=run) for i in range(2)])
    envelopes = await streams.collect(2 * len(wanted))
    samples = {(e.header.key.index, e.header.key.sample): e for e in envelopes}
    assert engine.requests == []
    for sample, (answer, reward) in enumerate(wanted):
        made_of = trajectory(samples[0, sample])
        assert text.decode([np.frombuffer(made_of.token_ids, "<i4")]) == [prompt + answer]
        mask = np.frombuffer(made_of.loss_mask, np.uint8)
        assert mask.tolist() == [0] * len(prompt) + [1] * (len(answer) + 1)
        assert (made_of.outcome, made_of.reward) == (pb.OUTCOME_COMPLETED, reward)
        assert samples[1, sample].header.reason == "PROMPT_INVALID"
    await made.stop()


async def test_throughput_is_reported_once_a_second(
    daemon: Daemon, example: Example, run: str, streams: RunStreams, engine: ScriptedEngine, text: Text
) -> None:
    from rollout.event.v1 import event_pb2

    made = await worker(daemon, config(example), run, engine, text)
    await streams.issue([prompt_group(0, example.rows(1)[0], run=run)])
    puller = await streams.js.pull_subscribe(f"rollout.events.{run}", stream="EVENTS")
    kinds: dict[str, event_pb2.Event] = {}
    while "sampling" not in kinds:
        for message in await puller.fetch(1, timeout=60):
            kinds.update({event.kind: event for event in event_pb2.EventBatch.FromString(message.data).events})
    assert kinds["sampling"].metrics["samples_per_second"] > 0
    assert set(kinds["sampling"].metrics) == {
        "samples",
        "samples_per_second",
        "tokens_per_second",
        "time/engine",
        "time/engine_forward",
    }
    await made.stop()


async def test_a_group_that_is_delivered_twice_is_sampled_once(
    daemon: Daemon, example: Example, run: str, streams: RunStreams, engine: ScriptedEngine, text: Text,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(Heartbeat, "hold", lambda self, reply: None)  # progress acks are lost, so the stream delivers again
    made = await worker(daemon, config(example), run, engine, text)
    await engine.pause()
    await streams.issue([prompt_group(0, example.rows(1)[0], run=run)])
    info = await until(lambda: _redelivered(streams))
    assert info
    await engine.resume()
    assert len(await streams.collect(4)) == 4
    await until(lambda: _left(streams, 0))
    assert len(engine.requests) == 1
    await made.stop()


async def _left(streams: RunStreams, items: int) -> bool:
    return await streams.work_left() == items


async def _redelivered(streams: RunStreams) -> bool:
    return (await streams.js.consumer_info(f"WORK_{streams.run}", "workers")).num_redelivered == 1
