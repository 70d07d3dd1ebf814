"""The engines of this project pass ``enginetest``; broken ones fail it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rollout_testing import enginetest
from rollout_testing.sim import policy
from rollout_testing.sim.engine import CAPABILITIES as SIMULATED
from rollout_testing.sim.engine import SimEngine
from rollout_workers.engines import registry
from rollout_workers.engines.base import Engine, GroupRequest, SampleOutput, WeightsSource
from rollout_workers.engines.transformers import EngineConfig, TransformersEngine
from rollout_workers.weights import named_weights, weights_digest

from .tiny import byte_tokenizer, plain_logprobs, tiny_model


class TransformersHarness(enginetest.Harness):
    """A tiny model. Version n has the random weights of seed n."""

    capabilities = registry.ENGINES["transformers"].capabilities
    tolerance = 1e-4

    def __init__(self) -> None:
        self.models = [tiny_model(seed) for seed in range(3)]

    @asynccontextmanager
    async def start(self, *, deterministic: bool = False) -> AsyncIterator[Engine]:
        config = EngineConfig(slots=enginetest.SLOTS, max_len=128, threads=1, deterministic=deterministic)
        engine = TransformersEngine(tiny_model(0), config, tokenizer=byte_tokenizer())
        try:
            yield engine
        finally:
            await engine.shutdown()

    def weights(self, version: int) -> tuple[WeightsSource, str]:
        tensors = dict(named_weights(self.models[version]))
        return tensors, weights_digest(tensors.items()).root

    def expected(self, request: GroupRequest, output: SampleOutput, version: int) -> Any:
        return plain_logprobs(self.models[version], np.asarray(request.prompt_ids), output.token_ids)

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> Any:
        return self.models[0](torch.tensor([list(tokens)])).logits[0].numpy()


class SimulatedHarness(enginetest.Harness):
    """The engine without a model. Version n is a vector of words."""

    capabilities = SIMULATED
    engine = SimEngine

    def __init__(self, folder: Any) -> None:
        self.folder = folder
        for version in range(3):
            policy.write_model(folder / f"v{version}", version)
        self.words = [policy.read(folder / f"v{version}") for version in range(3)]

    @asynccontextmanager
    async def start(self, *, deterministic: bool = False) -> AsyncIterator[Engine]:
        engine = self.engine(str(self.folder / "v0"), 0, enginetest.SLOTS, seconds=0.05)
        try:
            yield engine
        finally:
            await engine.shutdown()

    def weights(self, version: int) -> tuple[WeightsSource, str]:
        return str(self.folder / f"v{version}"), policy.digest(self.words[version]).root

    def expected(self, request: GroupRequest, output: SampleOutput, version: int) -> Any:
        seed = request.seeds[output.sample]
        most = request.params.max_tokens
        return policy.sample(self.words[version], list(request.prompt_ids), seed, most)[1]

    def logits(self, tokens: Sequence[int]) -> Any:
        raise AssertionError("the simulated engine does not declare greedy sampling")


@pytest.fixture(scope="module")
def transformers() -> TransformersHarness:
    return TransformersHarness()


@pytest.mark.parametrize("case", enginetest.applicable(TransformersHarness.capabilities))
async def test_transformers_conforms(case: str, transformers: TransformersHarness) -> None:
    await enginetest.run(case, transformers)


@pytest.mark.parametrize("case", enginetest.applicable(SIMULATED))
async def test_the_simulated_engine_conforms(case: str, tmp_path: Any) -> None:
    await enginetest.run(case, SimulatedHarness(tmp_path))


class Forgetful(SimEngine):
    """Reports weights that it does not use."""

    async def swap_weights(self, version: int) -> None:
        words = self.words
        await super().swap_weights(version)
        self.words = words


class Leaking(SimEngine):
    """Loses aborted requests."""

    async def abort(self, request_ids: Sequence[str]) -> tuple[str, ...]:
        found = await super().abort(request_ids)
        self._running.update(dict.fromkeys((f"leak-{name}" for name in found), False))
        return found


@pytest.mark.parametrize(
    ("broken", "case"),
    [
        (Forgetful, "a_swap_changes_version_and_digest"),
        (Forgetful, "nothing_of_old_weights_is_reused"),
        (Leaking, "random_aborts_leak_no_slot"),
    ],
)
async def test_a_broken_engine_fails(broken: type[SimEngine], case: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedHarness, "engine", broken)

    async def idle_now(engine: Engine) -> None:
        assert engine.stats().active == 0

    monkeypatch.setattr(enginetest, "idle", idle_now)
    with pytest.raises(AssertionError):
        await enginetest.run(case, SimulatedHarness(tmp_path))


async def test_raw_logprobs_must_be_declared(tmp_path: Any) -> None:
    harness = SimulatedHarness(tmp_path)
    harness.capabilities = replace(SIMULATED, raw_logprobs=not SIMULATED.raw_logprobs)
    with pytest.raises(AssertionError):
        await enginetest.run("logprobs_equal_a_plain_forward_pass", harness)


def test_the_table_is_json_without_torch() -> None:
    code = "import sys; from rollout_workers.engines import registry; registry.table(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    done = subprocess.run([sys.executable, "-m", "rollout_workers.engines.registry"], check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["transformers"]["attention"] == ["full_attention", "sliding_attention", "chunked_attention"]


def test_an_unknown_engine_is_rejected() -> None:
    with pytest.raises(registry.UnknownEngine, match="engine 'another' is unknown"):
        registry.load("another", registry.LoadRequest("", 0, "float32", slots=1, max_len=8))
