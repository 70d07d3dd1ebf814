"""An external Go module, a Python script, and a grpcurl script each submit a run and follow it
until it ends."""

import os
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from conftest import ROOT
from mesh import mesh
from openai.types.chat import ChatCompletionMessageParam

from rollout.run.v1 import run_pb2

CLIENTS = ROOT / "examples" / "clients"


def command(client: str, state: Path, config: Path, overrides: tuple[str, ...]) -> tuple[list[str], Path]:
    flags = [part for override in overrides for part in ("--set", override)]
    if client == "go":
        return ["go", "run", ".", "-state", str(state), *flags, str(config)], CLIENTS / "go"
    if client == "python":
        return [sys.executable, str(CLIENTS / "python" / "submit.py"), "--state", str(state), *flags, str(config)], ROOT
    return [str(CLIENTS / "grpcurl" / "submit.sh"), str(state), str(config), *overrides], ROOT


@pytest.mark.parametrize("client", ["go", "python", "grpcurl"])
def test_clients_submit_and_follow_a_run(client: str, config: Path, tmp_path: Path) -> None:
    with mesh(tmp_path) as running:
        argv, folder = command(client, tmp_path, config, ("train.steps=2",))
        path = f"{ROOT / '.tools' / 'bin'}:{os.environ['PATH']}"
        environment = {**os.environ, "GOWORK": "off", "PATH": path, "PYTHONPATH": str(ROOT / "python")}
        done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        runs = running.scheduler.ListRuns(run_pb2.ListRunsRequest()).runs
        assert [run.state for run in runs] == [run_pb2.RUN_STATE_SUCCEEDED]
        assert runs[0].run_id in done.stdout


def test_official_openai_client_while_a_run_trains(config: Path, tmp_path: Path) -> None:
    with mesh(tmp_path) as running:
        run = running.submit(config, 'reward.plugin="reward.py:slow_digit_share"', "train.steps=12", "eval.every_steps=0")
        running.until_step(run, 1)
        client = openai.OpenAI(base_url=f"{running.daemon()['gateway']}/v1", api_key="none")
        model = client.models.list().data[0].id
        question: list[ChatCompletionMessageParam] = [{"role": "user", "content": "2+2="}]
        chat = client.chat.completions.create(model=model, messages=question, max_tokens=3, temperature=0)
        assert chat.usage is not None and chat.usage.completion_tokens >= 1
        pieces = list(client.chat.completions.create(model=model, messages=question, max_tokens=3, temperature=0, stream=True))
        assert pieces[-1].choices[0].finish_reason in ("stop", "length")
        streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        assert len(streamed) <= 3
        plain = client.completions.create(model=model, prompt="2+2=", max_tokens=3, temperature=0, logprobs=1)
        assert plain.choices[0].logprobs is not None
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="another", prompt="2+2=")
        assert running.status(run).run.state == run_pb2.RUN_STATE_RUNNING
        running.finish(run)


def test_examples_of_the_python_client(config: Path, tmp_path: Path) -> None:
    """The asyncio example runs two configs at the same time; the buffer example needs no worker."""
    with mesh(tmp_path) as running:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
        folder = CLIENTS / "python"

        def example(name: str, *arguments: str) -> str:
            argv = [sys.executable, str(folder / name), "--state", str(tmp_path), *arguments]
            done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        swept = example("sweep.py", str(config), "1e-4", "2e-4", "--set", "train.steps=2")
        assert swept.count("with learning_rate = ") == 2
        runs = running.scheduler.ListRuns(run_pb2.ListRunsRequest()).runs
        assert [run.state for run in runs] == [run_pb2.RUN_STATE_SUCCEEDED] * 2
        assert example("own_samples.py").count("samples are durable") == 4
