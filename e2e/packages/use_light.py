"""Uses the modules of rollout-rl in an environment that has nothing else.

use_light.py [EXTRA]
use_light.py --train STATE CONFIG: also train a run on the rolloutd of a state folder
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rollout import algorithm, dialogue
from rollout.client import NoDaemon, PlanRefused, RemoteError, connect, connect_async
from rollout.client import buffer as samples
from rollout.dataset import BadRow, prompts
from rollout.environment import Observation
from rollout.errors import RolloutError
from rollout.expression import Expression
from rollout.hosting import wire
from rollout.hosting.child import ChildProcess
from rollout.hosting.runner import InProcess, Runner
from rollout.hosting.sidecar import Sidecar
from rollout.plugin import Sample, call_reward, load_reward
from rollout.plugin.v1 import plugin_pb2
from rollout.run.v1.run_pb2 import RUN_STATE_SUCCEEDED
from rollout.teacher import TeacherEndpoint, TeacherUnreachable

REWARD = "def exact(samples):\n    return [float(s.completion == s.row['answer']) for s in samples]\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "reward.py").write_text(REWARD)
        (folder / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\nnothing\n')
        plugins(folder)
        asyncio.run(runners(folder))
        rows(folder)
        probe(folder)
        expression("cel" in sys.argv)
        no_server(folder)
    if "--train" in sys.argv:
        state, config = map(Path, sys.argv[2:])
        buffer(state)
        train(state, config)
        asyncio.run(read(state))
    assert "torch" not in sys.modules


def raised(kind: type[Exception], call: Callable[[], object]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def plugins(folder: Path) -> None:
    reward = load_reward("reward.py:exact", folder)
    given = [Sample("1+1=", text, {"answer": "2"}) for text in ("2", "3")]
    assert [score.reward for score in call_reward(reward, given)] == [1.0, 0.0]
    ids = wire.observation_from(wire.observation_to(Observation(np.arange(3, dtype=np.int32)))).token_ids
    assert ids.tolist() == [0, 1, 2]


async def runners(folder: Path) -> None:
    source = {"kind": "reward", "plugin": "reward.py:exact", "base_dir": str(folder)}
    address = f"unix:{folder}/plugin.sock"
    command = [sys.executable, "-m", "rollout.hosting.sidecar", f"reward={folder}/reward.py:exact", "--address", address]
    process = subprocess.Popen(command)
    try:
        ways: list[Runner] = [InProcess([source]), ChildProcess([source]), Sidecar(address)]
        for runner in ways:
            hello = await runner.start()
            assert [plugin.name for plugin in hello.plugins], runner
            request = plugin_pb2.RewardRequest()
            group = request.groups.add(row_json=b'{"answer": "2"}')
            group.samples.add(prompt="1+1=", completion="2")
            answer = await runner.call("Reward", request, 30.0)
            assert [score.reward for score in answer.scores] == [1.0], answer
            await runner.close()
    finally:
        process.kill()
        process.wait()


def rows(folder: Path) -> None:
    found = prompts(folder / "rows.jsonl", "prompt")
    assert next(found) == "1+1="
    raised(BadRow, lambda: next(found))
    row = {"prompt": "hi", "chosen": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
    assert dialogue.plain_row(row, "prompt", ["chosen"])["chosen"] == "hello"
    assert algorithm.samples("grpo") and not algorithm.samples("sft")
    teacher = TeacherEndpoint("http://127.0.0.1:9/v1", "teacher", timeout_seconds=1.0)
    raised(TeacherUnreachable, lambda: teacher.logprobs([1, 2], 1))


def probe(folder: Path) -> None:
    sample = {"prompt": "1+1=", "completion": "2", "row": {"answer": "2"}}
    reward = {"plugin": "reward.py:exact", "base_dir": str(folder), "timeout_seconds": 30.0, "samples": [sample], "files": []}
    request = json.dumps({"packages": ["rollout-rl", "torch"], "reward": reward})
    done = subprocess.run([sys.executable, "-m", "rollout.probe"], input=request, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert answer["reward"]["scores"][0]["reward"] == 1.0, answer
    assert answer["packages"]["rollout-rl"] and answer["packages"]["torch"] is None, answer


def expression(installed: bool) -> None:
    text = "completion == row.answer ? 1.0 : 0.0"
    if not installed:
        assert "pip install 'rollout-rl[cel]'" in raised(RolloutError, lambda: Expression(text))
        return
    assert Expression(text)([Sample("1+1=", "2", {"answer": "2"})]) == [1.0]


def no_server(folder: Path) -> None:
    assert "rollout daemon start" in raised(NoDaemon, lambda: connect(state=folder))


def buffer(state: Path) -> None:
    size, run = 4, "run-external"
    with samples.connect(state=state) as client:
        client.open(run, samples.Ledger(group_size=size, groups_per_step=1, rows=10))
        with client.producer(run) as producer:
            group = [samples.Sample(np.arange(5, dtype=np.int32)) for _ in range(size)]
            assert producer.put(0, group).result().accepted == size
        for batch in client.consumer(run, steps=1):
            assert [len(sample.token_ids) for group in batch.groups for sample in group] == [5] * size
            batch.commit(trim=True)


def train(state: Path, config: Path) -> None:
    with connect(state=state) as client:
        raised(RemoteError, lambda: client.run("run-absent"))
        raised(PlanRefused, lambda: client.plan(config, set=["train.steps=-1"]))
        plan = client.plan(config, set=["train.steps=2", "eval.every_steps=0", "snapshot.every_steps=2"])
        run = client.submit(plan)
        last = None
        for status in client.follow(run.run_id):
            last = status.run
        assert last is not None and last.state == RUN_STATE_SUCCEEDED and last.step == 2, last


async def read(state: Path) -> None:
    async with connect_async(state=state) as client:
        (run,) = await client.runs(limit=1)
        assert run.state == RUN_STATE_SUCCEEDED
        assert (await client.run(run.run_id)).run.step == 2
        assert [step for step, _ in (await client.metrics(run.run_id, ["reward/mean"]))["reward/mean"]] == [1, 2]
        async for event in client.tail(run.run_id):
            assert event.run_id == run.run_id
            break


if __name__ == "__main__":
    main()
