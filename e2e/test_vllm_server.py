"""The engine `vllm` with `engine.url` passes the conformance suite, on a real `vllm serve` with the
tiny model. Run by `make check-vllm` in vLLM's environment."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from byte_model import MAX_LEN, Versions, byte_tokenizer, model_of

from rollout_testing import enginetest
from rollout_testing.waiting import until
from rollout_workers.engines import registry
from rollout_workers.engines.base import Engine, GroupRequest, SamplingParams
from rollout_workers.engines.errors import EngineFailed
from rollout_workers.engines.vllm import serve
from rollout_workers.weights import named_weights, read_manifest, write_weights


def wanted(folder: Path, port: int, **changes: Any) -> registry.LoadRequest:
    return registry.LoadRequest(
        str(folder), 0, "float32", slots=enginetest.SLOTS, max_len=MAX_LEN, url=f"http://127.0.0.1:{port}", **changes
    )


class Served:
    """`vllm serve` as the error messages say."""

    def __init__(self, folder: Path, *more: str, without: str = "", **environment: str) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port: int = sock.getsockname()[1]
        words = shlex.split(serve.command(wanted(folder, self.port)))
        at = words.index("python")
        variables = dict(word.split("=", 1) for word in words[:at])
        arguments = [word for word in words[at + 1 :] if word != without]
        self.log = folder / f"serve-{self.port}.log"
        variables |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", **environment}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *arguments, *more],
                env=os.environ | variables, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        ends = time.monotonic() + 900
        while True:
            try:
                httpx2.get(f"http://127.0.0.1:{self.port}/health", timeout=5, trust_env=False).raise_for_status()
                return
            except httpx2.HTTPError:
                assert self.process.poll() is None, self.log.read_text()[-4000:]
                assert time.monotonic() < ends, self.log.read_text()[-4000:]
                time.sleep(0.5)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)


class ServedHarness(Versions):
    """Version n has the random weights of seed n. All cases use one server, and each its own
    client, which brings the server back to version 0."""

    capabilities = registry.ENGINES["vllm"].capabilities

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.models[0].save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        self.served = Served(folder)

    @asynccontextmanager
    async def start(self, *, deterministic: bool = False, **changes: Any) -> AsyncIterator[Engine]:
        assert not deterministic, "the engine does not declare determinism"
        engine = registry.load("vllm", wanted(self.folder, self.served.port, **changes))
        try:
            yield engine
        finally:
            await engine.shutdown()


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHarness]:
    made = ServedHarness(tmp_path_factory.mktemp("served"))
    yield made
    made.served.close()


@pytest.mark.parametrize("case", enginetest.applicable(ServedHarness.capabilities))
async def test_a_server_of_vllm_conforms(case: str, harness: ServedHarness) -> None:
    await enginetest.run(case, harness)


async def test_the_digest_after_a_swap_is_the_one_of_the_published_folder(harness: ServedHarness, tmp_path: Path) -> None:
    published = tmp_path / "v7"
    write_weights(published, harness.models[2], config_source_dir=harness.folder, version=7)
    digest = read_manifest(published).digest
    async with harness.start() as engine:
        assert await engine.stage_weights(str(published), digest) == digest
        await engine.swap_weights(7)
        assert await engine.weights_digest() == digest


async def test_a_server_belongs_to_one_worker(harness: ServedHarness) -> None:
    """The first client fails when a second one loads its weights, and does not report samples of
    other weights."""
    request = GroupRequest("a", (65,), (1,), SamplingParams(4, ignore_eos=True))
    async with harness.start() as first:
        assert not (await enginetest.collect(first, request))["a", 0].error
        async with harness.start():

            async def refused() -> bool:
                try:
                    output = (await enginetest.collect(first, request))["a", 0]
                except EngineFailed as error:
                    return "another worker uses it" in str(error)
                return output.error is not None

            assert await refused() and await until(refused)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"url": "http://127.0.0.1:9"}, serve.ServerUnreachable, "nothing answers at http://127.0.0.1:9"),
        ({"max_len": MAX_LEN + 1}, serve.ServerOptions, f"a context of {MAX_LEN + 1} tokens"),
    ],
    ids=["unreachable", "context"],
)
def test_a_server_that_does_not_fit_is_refused(
    harness: ServedHarness, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    request = replace(wanted(harness.folder, harness.served.port), **change)
    with pytest.raises(error, match=message) as caught:
        registry.load("vllm", request)
    assert serve.command(request) in str(caught.value), "the message has the command"


def test_another_model_is_refused(harness: ServedHarness, tmp_path: Path) -> None:
    model_of(0).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(serve.ServerModel, match=r"num_hidden_layers = 2, and that of the run .* has 3"):
        registry.load("vllm", wanted(tmp_path, harness.served.port))


@pytest.fixture(scope="module")
def plain(harness: ServedHarness) -> Iterator[Served]:
    """A server without the worker extension."""
    made = Served(harness.folder, "--worker-extension-cls", "")
    yield made
    made.close()


async def test_a_server_without_the_extension_needs_verify_none(harness: ServedHarness, plain: Served) -> None:
    request = wanted(harness.folder, plain.port)
    with pytest.raises(serve.ServerOptions, match="without the worker extension"):
        registry.load("vllm", request)
    engine = registry.load("vllm", replace(request, verify="none"))
    try:
        asked = enginetest.request("a", tokens=24, temperature=0.0)
        before = (await enginetest.collect(engine, asked))["a", 0]
        await engine.stage_weights(dict(named_weights(harness.models[1])))
        await engine.swap_weights(1)
        after = (await enginetest.collect(engine, asked))["a", 0]
        assert before.error is after.error is None and before.token_ids.tolist() != after.token_ids.tolist()
        assert [span.version for span in after.version_spans] == [1]
    finally:
        await engine.shutdown()


def test_a_server_with_the_logprobs_of_another_distribution_is_refused(harness: ServedHarness) -> None:
    raw = Served(harness.folder, "--logprobs-mode", "raw_logprobs")
    try:
        with pytest.raises(serve.ServerOptions, match="another distribution"):
            registry.load("vllm", wanted(harness.folder, raw.port))
    finally:
        raw.close()
