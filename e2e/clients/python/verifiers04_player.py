"""Plays rollouts of `verifiers` 0.4 with its training client: a JSON object on each line of stdin
names a session (`url`, `model`), and one on stdout has its reward and the tokens of its trace.

    verifiers04_player.py FOLDER-OF-THE-TOKENIZER
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import verifiers.v1 as vf


async def play(environment: Any, task: Any, order: dict[str, Any]) -> dict[str, Any]:
    """One rollout in a session of the gateway."""
    client = vf.TrainClientConfig(base_url=order["url"], api_key_var="ROLLOUT_KEY", renderer_model_name=sys.argv[1])
    context = vf.ModelContext(
        model=order["model"], client=client, sampling=vf.Sampling(temperature=1.0, max_tokens=order["max_tokens"])
    )
    episode = await environment.run_episode(task, context)
    if not episode.ok:
        return {"session": order["session"], "error": str([episode.errors, *(trace.errors for trace in episode.traces)])}
    [trace] = episode.traces
    [branch] = trace.branches
    return {
        "session": order["session"], "reward": trace.reward,
        "ids": list(branch.token_ids), "sampled": list(branch.sampled_mask), "logprobs": list(branch.logprobs),
    }  # fmt: skip


async def main() -> None:
    """Play until stdin ends."""
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    environment = vf.SingleAgentEnv(vf.SingleAgentEnvConfig(taskset={"id": "guessing_taskset"}, agent=agent))
    async with environment.serving():
        [task] = list(environment.taskset)

        async def answer(line: str) -> None:
            print(json.dumps(await play(environment, task, json.loads(line))), flush=True)

        async with asyncio.TaskGroup() as tasks:
            while line := await asyncio.to_thread(sys.stdin.readline):
                tasks.create_task(answer(line))


asyncio.run(main())
