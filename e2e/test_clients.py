"""An external Go module, a Python script, and a grpcurl script each submit a run and follow it
until it ends."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anthropic
import httpx
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
        dialects(str(running.daemon()["gateway"]), client, model)
        assert running.status(run).run.state == run_pb2.RUN_STATE_RUNNING
        running.finish(run)


def dialects(gateway: str, client: openai.OpenAI, model: str) -> None:
    """Use every other endpoint of the gateway once, with the real worker."""

    def post(path: str, **body: object) -> dict[str, Any]:
        answer = httpx.post(gateway + path, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    question: list[ChatCompletionMessageParam] = [{"role": "user", "content": "2+2="}]
    chat = client.chat.completions.create(model=model, messages=question, max_tokens=3, extra_body={"return_token_ids": True})
    choice = chat.choices[0].model_dump()
    assert chat.model_dump()["prompt_token_ids"] == post("/tokenize", model=model, messages=question)["tokens"]
    assert (
        len(choice["token_ids"]) == len(choice["token_logprobs"]) == sum(s["end"] - s["start"] for s in choice["weight_versions"])
    )

    prompt = post("/tokenize", prompt="2+2=")["tokens"]
    assert post("/detokenize", tokens=prompt)["prompt"] == "2+2="
    echoed = client.completions.create(model=model, prompt="2+2=", echo=True, logprobs=2, max_tokens=0).choices[0]
    assert echoed.logprobs is not None and echoed.logprobs.token_logprobs is not None and echoed.logprobs.top_logprobs is not None
    assert echoed.text == "2+2=" and len(echoed.logprobs.token_logprobs) == len(prompt)
    tokens = post("/inference/v1/generate", token_ids=prompt, sampling_params={"max_tokens": 3, "logprobs": 1, "seed": 1})
    native = post("/generate", input_ids=prompt, sampling_params={"max_new_tokens": 3, "sampling_seed": 1}, return_logprob=True)
    assert tokens["choices"][0]["token_ids"] and native["meta_info"]["weight_version"].isdigit()

    response = client.responses.create(model=model, input="2+2=", max_output_tokens=3)
    again = client.responses.create(model=model, input="3+3=", max_output_tokens=3, previous_response_id=response.id)
    assert again.usage is not None and response.usage is not None and again.usage.input_tokens > response.usage.input_tokens
    events = list(client.responses.create(model=model, input="2+2=", max_output_tokens=3, stream=True))
    assert events[-1].type in ("response.completed", "response.incomplete")

    agent = anthropic.Anthropic(base_url=f"{gateway}/sessions/agent", api_key="none")
    message = agent.messages.create(model=model, max_tokens=3, messages=[{"role": "user", "content": "2+2="}])
    assert message.stop_reason in ("max_tokens", "end_turn") and message.usage.output_tokens >= 1
    counted = agent.messages.count_tokens(model=model, messages=[{"role": "user", "content": "2+2="}])
    assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    with agent.messages.stream(model=model, max_tokens=3, messages=[{"role": "user", "content": "2+2="}]) as stream:
        assert stream.get_final_message().usage.output_tokens >= 1


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
