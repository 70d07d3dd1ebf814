"""Makes examples of the rows that a run trains on, in the process of the learner.

Only a tokenizer is needed for that, so a run that samples nothing has no inference worker: the
learner pulls the rows from the run's work stream and publishes their examples, through the pipeline
of the inference workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollout.algorithm import has_inference_workers
from rollout.run.v1.run_pb2 import WorkerSpec
from rollout_workers.data.prompts import PromptReader, Text
from rollout_workers.data.rows import rows_of
from rollout_workers.worker.bus import Reconnects, connect_worker
from rollout_workers.worker.discovery import Services
from rollout_workers.worker.heartbeat import Heartbeat
from rollout_workers.worker.lifecycle import Lifecycle
from rollout_workers.worker.publisher import Publisher
from rollout_workers.worker.spec import Identity, model_directory


def load_text(spec: WorkerSpec) -> Text:
    """The tokenizer of the plan's model; blocks."""
    text = Text.load(model_directory(spec))
    text.warm()
    return text


@asynccontextmanager
async def feeding(
    spec: WorkerSpec, who: Identity, lifecycle: Lifecycle, heartbeat: Heartbeat, services: Services
) -> AsyncIterator[None]:
    """Feed the learner with rows inside of the ``async with`` block, if the run has no inference
    workers. Raises ``PromptInvalid`` if the tokenizer has no end-of-sequence token."""
    if has_inference_workers(spec.plan.config):
        yield
        return
    from rollout_workers.inference.pipeline import Pipeline  # other learners need none of its modules
    from rollout_workers.inference.throughput import Throughput, no_engine

    config = spec.plan.config
    text = await asyncio.to_thread(load_text, spec)
    prompts = PromptReader(text, prompt_field=config.data.prompt_field, chat_template=config.model.chat_template)
    rows = rows_of(config, text, prompts)
    assert rows is not None, "a run that does not sample trains on rows"
    reconnects = Reconnects()
    client = await lifecycle.unless_leaving(asyncio.create_task(connect_worker(spec, who, lifecycle, reconnects)))
    if client is None:
        yield
        return
    try:
        publisher = Publisher(client, who.trajectory_subject, who.trajectory_stream, who.process)
        pipeline = Pipeline.of_rows(who, rows, publisher, services, Throughput(no_engine))
        await pipeline.start(client, heartbeat, who, reconnects)
        try:
            yield
        finally:
            await pipeline.drain(lifecycle)
    finally:
        await client.close()
