"""Distillation from samples to a step: trajectories contain the teacher's logprobs, failures never
become 0, and the student learns."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import crc32c
import numpy as np
import pytest

from rollout.buffer.v1.buffer_pb2 import Batch, SampleRef
from rollout.environment import Task
from rollout.run.v1.run_pb2 import PromptGroup
from rollout.trajectory.v1.trajectory_pb2 import Trajectory, TrajectoryEnvelope
from rollout.weights.v1.weights_pb2 import WeightsReceipt
from rollout_testing.run import Example, config
from rollout_workers.data.prompts import PromptReader, Text
from rollout_workers.engines.base import SamplingParams
from rollout_workers.engines.transformers import EngineConfig, TransformersEngine
from rollout_workers.environments.episode import EpisodeRunner, sample_seed
from rollout_workers.environments.single_turn import SingleTurn
from rollout_workers.environments.teacher import with_teacher
from rollout_workers.inference.encode import encode_group
from rollout_workers.learner.payload import read_segments
from rollout_workers.trainer import Schedule, Trainer, TrainerConfig
from tests.teacher.server import Served

HOLDINGS: Any = SimpleNamespace(of=lambda version: WeightsReceipt(version=version or 0), digest=lambda version: "")


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    """Shuts down the environment, like a worker."""
    with ExitStack() as stack:
        yield stack


def runner(
    engine: TransformersEngine, example: Example, text: Text, served: Served, closing: ExitStack, retries: int = 0
) -> EpisodeRunner:
    run = config(example, "sft")
    endpoint = run.algorithm.distillation.endpoint
    endpoint.base_url, endpoint.model, endpoint.retries, endpoint.concurrency = served.url, "teacher", retries, 4
    prompts = PromptReader(text, prompt_field="prompt", chat_template=False)
    environment = with_teacher(run, SingleTurn(prompts, None, text), text, closing)
    return EpisodeRunner(engine, environment, text, SamplingParams(max_tokens=6))


async def sample(runner: EpisodeRunner, rows: list[bytes], step: int) -> list[TrajectoryEnvelope]:
    envelopes: list[TrajectoryEnvelope] = []
    tasks = [Task(f"{step}/{n}", row, (0,), (sample_seed(1, step, n, 0),), n) for n, row in enumerate(rows)]
    async for groups in runner.run(tasks):
        for group in groups:
            work = PromptGroup(run_id="run", epoch=step, index=group.task.row, group_size=1)
            envelopes += encode_group(work, group, HOLDINGS, "inference-0")
    return sorted(envelopes, key=lambda e: e.header.key.index)


def batch(envelopes: list[TrajectoryEnvelope], step: int, file: Path) -> Batch:
    """The batch in the form that the buffer leases it, with the payloads in a segment."""
    made, data = Batch(run_id="run", step=step), b""
    for envelope in envelopes:
        place = {
            "segment": str(file),
            "offset": len(data),
            "length": len(envelope.payload),
            "crc32c": crc32c.crc32c(envelope.payload),
        }
        made.samples.append(SampleRef(key=envelope.header.key, **place))  # pyright: ignore[reportArgumentType]
        data += envelope.payload
    file.write_bytes(data)
    return made


@pytest.fixture
async def engine(example: Example):
    made = TransformersEngine.load(str(example.model), EngineConfig(slots=32, max_len=32, deterministic=True, threads=1))
    yield made
    await made.shutdown()


@pytest.mark.timeout(300)
async def test_the_divergence_from_a_teacher_behind_an_endpoint_falls(
    engine: TransformersEngine, example: Example, text: Text, served: Served, closing: ExitStack, folder: Path
) -> None:
    trainer = Trainer(
        str(example.model), TrainerConfig(algorithm="distillation", schedule=Schedule(peak=1e-2), threads=1, temperature=1.0)
    )
    episodes, divergence = runner(engine, example, text, served, closing), []
    for step in range(1, 25):
        envelopes = await sample(episodes, example.rows(64, start=64 * step), step)
        assert [envelope.header.reason for envelope in envelopes] == [""] * 64
        samples = read_segments(batch(envelopes, step, folder / f"{step}.seg"))
        divergence.append(trainer.train_step(samples, step).metrics["kl/teacher"])
        await engine.stage_weights(
            {k: v.detach().clone() for k, v in trainer.policy.model.state_dict().items() if k != "lm_head.weight"}
        )
        await engine.swap_weights(step)
    first, last = statistics.mean(divergence[:3]), statistics.mean(divergence[-3:])
    assert first > 0.5 and last < 0.6 * first, divergence


async def test_trajectories_contain_the_teachers_logprobs(
    engine: TransformersEngine, example: Example, text: Text, served: Served, closing: ExitStack
) -> None:
    for envelope in await sample(runner(engine, example, text, served, closing), example.rows(4), 0):
        trajectory = Trajectory.FromString(envelope.payload)
        ids = np.frombuffer(trajectory.token_ids, "<i4")
        found = np.frombuffer(trajectory.teacher_logprobs, "<f4")
        values = served.answer({"prompt": ids.tolist()})["choices"][0]["logprobs"]["token_logprobs"]
        wanted = [0.0] * trajectory.prompt_tokens + values[trajectory.prompt_tokens : len(ids)]
        np.testing.assert_allclose(found, wanted, atol=1e-6)
        assert (found[trajectory.prompt_tokens :] < 0).all()


async def test_samples_fail_if_the_teacher_fails(
    engine: TransformersEngine, example: Example, text: Text, served: Served, closing: ExitStack
) -> None:
    served.spoil = lambda _: 404
    envelopes = await sample(runner(engine, example, text, served, closing, retries=3), example.rows(4), 0)
    assert [envelope.header.reason for envelope in envelopes] == ["TEACHER_REFUSED"] * 4
    assert len(served.asked) == 4  # the teacher rejects the same requests again
    assert not any(Trajectory.FromString(envelope.payload).teacher_logprobs for envelope in envelopes)


async def test_a_failed_call_is_retried(
    engine: TransformersEngine, example: Example, text: Text, served: Served, closing: ExitStack
) -> None:
    served.spoil = lambda answer: 503 if len(served.asked) <= 2 else answer
    envelopes = await sample(runner(engine, example, text, served, closing, retries=2), example.rows(4), 0)
    assert [envelope.header.reason for envelope in envelopes] == [""] * 4 and len(served.asked) == 6


async def test_a_busy_teacher_is_asked_again_when_it_says(
    engine: TransformersEngine, example: Example, text: Text, served: Served, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("rollout_workers.environments.teacher.asyncio.sleep", sleep)
    served.spoil, served.headers = lambda answer: 429 if len(served.asked) <= 1 else answer, {"Retry-After": "30"}
    envelopes = await sample(runner(engine, example, text, served, closing, retries=2), example.rows(4), 0)
    assert [envelope.header.reason for envelope in envelopes] == [""] * 4 and 30.0 in pauses


async def test_the_threads_end_with_the_worker(
    engine: TransformersEngine, example: Example, text: Text, served: Served, closing: ExitStack
) -> None:
    before, episodes = set(threading.enumerate()), runner(engine, example, text, served, closing)
    await sample(episodes, example.rows(4), 0)
    threads = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("teacher")]
    assert threads
    closing.close()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
