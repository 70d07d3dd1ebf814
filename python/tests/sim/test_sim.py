"""Workers without a model give repeatable results, report their weights correctly, and do not
import torch."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import grpc
import numpy as np
import pytest

from rollout_testing.sim import journal, policy
from rollout_testing.sim.engine import SimEngine, SimText
from rollout_testing.sim.journal import Journal
from rollout_workers.engines.base import GroupRequest, SampleOutput, SamplingParams
from rollout_workers.engines.errors import NothingStaged
from rollout_workers.worker.status import status_of


@pytest.fixture
def model(tmp_path: Path) -> Path:
    policy.write_model(tmp_path / "model")
    return tmp_path / "model"


def sampled(engine: SimEngine, seeds: tuple[int, ...] = (1, 2)) -> list[tuple[int, list[int]]]:
    async def run() -> list[tuple[int, list[int]]]:
        request = GroupRequest("0/0/0", (65, 66), seeds, SamplingParams(max_tokens=9))
        return [
            (o.version_spans[0].version, o.token_ids.tolist())
            async for o in engine.generate([request])
            if isinstance(o, SampleOutput)
        ]

    return asyncio.run(run())


def test_samples_depend_only_on_weights_prompt_and_seed(model: Path) -> None:
    first, again = SimEngine(str(model), 0, 4), SimEngine(str(model), 0, 4)
    assert sampled(first) == sampled(again)
    assert sampled(first, (2, 1)) == sampled(first)[::-1]  # independent of the place in the batch
    first.words[0] += np.uint64(1)
    assert sampled(first) != sampled(again)


def test_a_prompt_with_tools_is_answered_with_calls(model: Path) -> None:
    tool = {"function": {"name": "add", "parameters": {"type": "object"}}}
    text, words = SimText(), policy.read(model)
    [prompt] = text.encode([text.render([{"role": "user", "content": "row 1:"}], tools=[tool])])
    drawn = [policy.sample(words, prompt.tolist(), seed, 90) for seed in range(40)]
    calls = [said for said in text.decode(ids.tolist() for ids, _ in drawn) if said.startswith("<tool_call>")]
    assert 20 < len(calls) < 40
    assert all(len(ids) == len(logprobs) and ids[-1] == 0 for ids, logprobs in drawn)
    assert json.loads(calls[0].removeprefix("<tool_call>").removesuffix("</tool_call>"))["name"] == "add"
    first = [policy.sample(words, prompt.tolist(), seed, 1)[0][0] for seed in range(40)]
    assert first == [ids[0] for ids, _ in drawn]  # an aborted sample continues with the same tokens


def test_the_digest_is_computed_from_the_engines_weights(model: Path, tmp_path: Path) -> None:
    engine = SimEngine(str(model), 0, 4)
    words = policy.learn(engine.words, [b"a sample"], 1)
    written = policy.write(tmp_path / "v1", words, 1, model, fsync=False)

    async def take_over() -> None:
        with pytest.raises(NothingStaged):
            await engine.swap_weights(1)
        assert await engine.stage_weights(tmp_path / "v1") == written.digest
        assert await engine.weights_digest() != written.digest
        await engine.swap_weights(1)
        assert await engine.weights_digest() == written.digest
        engine.words[7] ^= np.uint64(1)
        assert await engine.weights_digest() != written.digest

    asyncio.run(take_over())


def test_every_sample_of_a_step_changes_the_digest(model: Path) -> None:
    words = policy.read(model)
    whole = policy.learn(words, [b"one", b"two"], 1)
    others = ([b"one"], [b"two", b"one"], [b"one", b"two", b"two"], [b"onet", b"wo"])
    assert all((policy.learn(words, batch, 1) != whole).any() for batch in others)
    assert (policy.learn(words, [b"one", b"two"], 2) != whole).any()


def test_a_model_of_another_type_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ValueError, match="qwen3"):
        SimEngine(str(tmp_path), 0, 4)


def test_an_incomplete_line_of_the_journal_is_ignored(tmp_path: Path) -> None:
    Journal(str(tmp_path), "learner-0").write(step=1)
    with open(tmp_path / "journal" / "learner-0.jsonl", "ab") as file:
        file.write(b'{"step":2')
    Journal(str(tmp_path), "learner-0").write(step=2)
    assert journal.read(tmp_path, "learner") == [{"step": 1}, {"step": 2}]


def test_tokens_are_characters() -> None:
    text = SimText()
    assert text.decode(text.encode(["row 7:"])) == ["row 7:"]


def test_the_planner_can_read_the_tokenizer(model: Path) -> None:
    from tokenizers import Tokenizer

    assert Tokenizer.from_file(str(model / "tokenizer.json")).encode("row 7:").ids == [ord(c) for c in "row 7:"]


_SHELLS = """
import json, sys
from rollout_testing.sim.install import install
install()
from rollout_workers.inference.worker import load, run_inference_worker
from rollout_workers.trainer import Trainer
from rollout_workers.learner.worker import run_learner_worker, trainer_config
print(json.dumps([load.__module__, Trainer.__module__, [m for m in ("torch", "transformers") if m in sys.modules]]))
try:
    import torch
except ImportError as error:
    print(error)
"""


def test_the_simulated_workers_start_without_torch() -> None:
    printed = subprocess.run([sys.executable, "-c", _SHELLS], capture_output=True, text=True, check=True).stdout.splitlines()
    assert json.loads(printed[0]) == ["rollout_testing.sim.install", "rollout_testing.sim.trainer", []]
    assert "imports torch" in printed[1]


def test_missing_weights_raise_the_same_error_as_the_real_engine(model: Path, tmp_path: Path) -> None:
    engine = SimEngine(str(model), 0, 4)
    with pytest.raises(policy.WeightsUnreadable, match="v000003") as refused:
        asyncio.run(engine.stage_weights(str(tmp_path / "v000003")))
    assert status_of(refused.value).code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
