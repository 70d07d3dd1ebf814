"""A model is served without a run: a folder, and the newest snapshot of a run."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import openai
from conftest import ROOT
from mesh import Mesh, mesh, until
from test_clients import dialects

from rollout.inference.v1 import inference_pb2

MODEL = ROOT / "models" / "addition"


def rollout(state: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "bin" / "rollout"), "--state-dir", str(state), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@contextmanager
def serving(state: Path, *arguments: str) -> Iterator[dict[str, Any]]:
    """`rollout serve` until the end of the block, which Ctrl-C ends. Yields what it printed."""
    command = [str(ROOT / "bin" / "rollout"), "--state-dir", str(state), "--format", "json", "serve", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("}"):
                break
        assert lines, process.communicate()
        yield json.loads("".join(lines))
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, process.communicate()
    finally:
        process.kill()
        process.wait()


def workers(state: Path) -> list[str]:
    """The process ids of workers whose spec is below the state folder."""
    spec = f"ROLLOUT_WORKER_SPEC={state}/".encode()
    return [path.parent.name for path in Path("/proc").glob("[0-9]*/environ") if spec in _read(path)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has exited, or is another user's
        return b""


def disconnect(running: Mesh, client: openai.OpenAI, model: str) -> None:
    """A request whose client disconnects is aborted in the engine. The engine is paused, so that
    the request cannot end by itself."""
    daemon = running.daemon()
    services = f"http://{daemon['consul']}/v1/health/service/inference-worker?passing=true"
    with urlopen(Request(services, headers={"X-Consul-Token": running.token()}), timeout=30) as response:
        [found] = json.load(response)
    worker = running.inference(found["Service"]["Meta"]["run"], f"{found['Service']['Address']}:{found['Service']['Port']}")

    def sampling() -> int:
        status = worker.GetInferenceStatus(inference_pb2.GetInferenceStatusRequest())
        return status.queued + status.active

    worker.PauseEngine(inference_pb2.PauseEngineRequest())
    url = urlsplit(str(client.base_url))
    connection = HTTPConnection(url.hostname or "", url.port)
    connection.request("POST", "/v1/completions", json.dumps({"model": model, "prompt": "1+1=", "stream": True}))
    until(lambda: sampling() == 1, "the engine to get the request", 30)
    connection.close()
    until(lambda: sampling() == 0, "the engine to abort the request", 30)
    worker.ResumeEngine(inference_pb2.ResumeEngineRequest())
    assert client.completions.create(model=model, prompt="1+1=", max_tokens=2).usage


def test_serve_a_folder_and_a_run(config: Path, tmp_path: Path) -> None:
    with mesh(tmp_path) as running:
        run = running.submit(config, "train.steps=2", "eval.every_steps=0")
        detached = rollout(tmp_path, "serve", "--model", str(MODEL), "--name", "before", "--detach")
        assert detached.returncode == 0 and "/v1/chat/completions" in detached.stdout, detached
        taken = rollout(tmp_path, "serve", "--model", str(MODEL), "--name", "before")
        assert taken.returncode == 73 and "served under the name before already" in taken.stderr, taken
        running.finish(run)
        with serving(tmp_path, "--model", run, "--name", "after", "--slots", "8") as served:
            assert served["weights_version"] == 2 and served["engine"] == "transformers"
            client = openai.OpenAI(base_url=served["base_url"], api_key="none")
            models = {model.id: model.model_dump() for model in client.models.list().data}
            assert {name: model["weights_version"] for name, model in models.items()} == {"before": 0, "after": 2}
            assert models["before"]["weights_digest"] != models["after"]["weights_digest"]
            stopped = rollout(tmp_path, "serve", "stop", "before")
            assert stopped.returncode == 0 and len(workers(tmp_path)) == 1, stopped
            dialects(served["base_url"].removesuffix("/v1"), client, "after")
            disconnect(running, client, "after")
        assert not workers(tmp_path)
        assert rollout(tmp_path, "serve", "list").stdout == "no model is served\n"
        for name, code, problem in (
            ("nothing", 66, "no folder and no run has this name"),
            ("./nothing", 66, "the folder of the model does not exist"),
            (str(tmp_path), 66, "has no config.json"),
        ):
            refused = rollout(tmp_path, "serve", "--model", name)
            assert refused.returncode == code and problem in refused.stderr, refused
