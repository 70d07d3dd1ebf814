"""Episodes of `verifiers` 0.4, with the client for evaluation and the one for training."""

from __future__ import annotations

import asyncio
import os
import sys
from importlib.metadata import version
from typing import Any

from case import KEY, MODEL, URL, report

os.environ |= {"ROLLOUT_KEY": KEY, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import verifiers.v1 as vf


async def play(client: Any) -> list[Any]:
    """An episode of each task."""
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    environment = vf.SingleAgentEnv(vf.SingleAgentEnvConfig(taskset={"id": "counting_taskset"}, agent=agent))
    sampling = vf.Sampling(temperature=0, max_tokens=40)
    context = vf.ModelContext(model=MODEL, client=client, sampling=sampling)
    async with environment.serving():
        tasks = list(environment.taskset)
        episodes = await asyncio.gather(*(environment.run_episode(task, context) for task in tasks))
    for episode in episodes:
        assert episode.ok, [episode.errors, *(trace.errors for trace in episode.traces)]
    return episodes


def evaluation() -> None:
    asyncio.run(play(vf.EvalClientConfig(base_url=f"{URL}/v1", api_key_var="ROLLOUT_KEY")))


def training() -> None:
    client = vf.TrainClientConfig(base_url=f"{URL}/v1", api_key_var="ROLLOUT_KEY", renderer_model_name=sys.argv[5])
    asyncio.run(play(client))


report("verifiers", version("verifiers"), [evaluation, training])
