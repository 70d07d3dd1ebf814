"""Environments of verifiers with the real packages (`make check-environments`): those of 0.2.1 in a
run of ours, and 0.4 through its training client, which exchanges token ids with the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from mesh import Mesh, mesh

from rollout.buffer.v1 import buffer_pb2
from rollout.client import Episode, connect_async
from rollout.environments.install import install
from rollout.trajectory.v1.trajectory_pb2 import Trajectory

CASES = ROOT / "e2e" / "support" / "verifiers_cases.py"
GOLDEN: dict[str, list[Any]] = {
    line["case"]: line["found"] for line in map(json.loads, CASES.with_suffix(".jsonl").read_text().splitlines())
}
"""Of each case, the observations, results, and errors in order. An error has its line in the
environment."""


@pytest.fixture(scope="module")
def interpreter() -> str:
    """Install verifiers 0.2.1 once, and return its Python."""
    return str(install("verifiers", ROOT / ".tools" / "plugins" / "verifiers"))


@pytest.fixture(scope="module")
def found(interpreter: str) -> dict[str, list[Any]]:
    """What the environments of the cases answer, all in one process."""
    done = subprocess.run([interpreter, str(CASES)], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    return {line["case"]: line["found"] for line in lines}


@pytest.mark.parametrize("case", list(GOLDEN))
def test_an_unmodified_environment_answers_and_scores_the_turns(found: dict[str, list[Any]], case: str) -> None:
    assert found[case] == GOLDEN[case]


def test_every_case_has_expected_answers(found: dict[str, list[Any]]) -> None:
    assert found.keys() == GOLDEN.keys()


def train(config: Path, state: Path, *arguments: str) -> str:
    command = [str(ROOT / "bin/rollout"), "run", "--config", str(config), "--state-dir", str(state), *arguments]
    done = subprocess.run(command, text=True, capture_output=True, timeout=290, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.timeout(600)
def test_a_policy_learns_a_game_of_verifiers(tmp_path: Path, interpreter: str) -> None:
    examples = ROOT / "examples"
    subprocess.run([sys.executable, str(examples / "agent_openai" / "prepare.py")], check=True, capture_output=True)
    try:
        train(examples / "agent_openai" / "sft.toml", tmp_path / "state")
        arguments = ("--from", "guess-sft", "--set", f'environment.python="{interpreter}"')
        said = train(examples / "environments" / "verifiers_guess.toml", tmp_path / "state", *arguments)
    finally:
        subprocess.run(
            [str(ROOT / "bin/rollout"), "daemon", "stop", "--state-dir", str(tmp_path / "state")],
            check=False,
            capture_output=True,
        )
    rewards = [float(value) for value in re.findall(r"step [0-9]+/60  reward (-?[0-9.]+)", said)]
    assert len(rewards) == 60, said
    print(f"mean reward of the first five steps {np.mean(rewards[:5]):.2f}, of the last five {np.mean(rewards[-5:]):.2f}")
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.15, rewards


ROLLOUTS = int(os.environ.get("ROLLOUTS", "100"))
GROUPS, SAMPLES, TOKENS = 5, 4, 16


@pytest.fixture(scope="module")
def player() -> str:
    """Install verifiers 0.4 once, and return its Python."""
    folder, lock = ROOT / ".tools" / "clients" / "verifiers-0.4", ROOT / "e2e" / "clients" / "locks" / "verifiers-0.4.lock"
    uv, python = str(ROOT / ".venv/bin/uv"), str(folder / "bin" / "python")
    if not Path(python).exists():
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
    subprocess.run(
        [uv, "pip", "install", "--quiet", "--python", python, "--no-deps", "--require-hashes", "-r", str(lock)], check=True
    )
    return python


async def play_all(running: Mesh, run: str, player: str, model: Path) -> dict[tuple[int, int, int, int], dict[str, Any]]:
    """Play the run's episodes, and return the traces by the keys of the trajectories."""
    environment = {
        **os.environ, "ROLLOUT_KEY": running.token(), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}",
    }  # fmt: skip
    script = ROOT / "e2e" / "clients" / "python" / "verifiers04_player.py"
    process = await asyncio.create_subprocess_exec(
        player, str(script), str(model), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment
    )
    assert process.stdin is not None and process.stdout is not None
    open_: dict[str, Episode] = {}
    traces: dict[tuple[int, int, int, int], dict[str, Any]] = {}

    async def collect(lines: AsyncIterator[bytes]) -> None:
        async for line in lines:
            if not line.startswith(b'{"session"'):
                continue
            trace = json.loads(line)
            episode = open_.pop(trace["session"])
            assert "error" not in trace, trace["error"]
            await episode.close(trace["reward"])
            traces[*episode.group, episode.sample] = trace

    collecting = asyncio.create_task(collect(process.stdout))
    try:
        server = running.daemon("rollout-gateway")
        async with connect_async(str(server["grpc"]), token=running.token()) as client:
            async for episode in client.episodes(run, groups=1):
                open_[episode.session_id] = episode
                order = {"session": episode.session_id, "url": episode.base_url, "model": episode.model, "max_tokens": TOKENS}
                process.stdin.write(json.dumps(order).encode() + b"\n")
                if collecting.done():
                    break
            process.stdin.close()
            await collecting
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            process.kill()
        await process.wait()
    return traces


@pytest.mark.timeout(1500)
def test_traces_of_verifiers_0_4_have_the_token_ids_that_are_trained_on(tmp_path: Path, player: str) -> None:
    example = ROOT / "examples" / "agent_openai"
    subprocess.run([sys.executable, str(example / "prepare.py")], check=True, capture_output=True)
    steps = ROLLOUTS // (GROUPS * SAMPLES)
    small = (
        f"train.steps={steps}", f"train.groups_per_step={GROUPS}", f"sampling.group_size={SAMPLES}",
        f"sampling.max_tokens={TOKENS}", "limits.agent_seconds=600", "snapshot.keep_payloads=true",
    )  # fmt: skip
    with mesh(tmp_path) as running:
        run = running.submit(example / "grpo.toml", *small)
        traces = asyncio.run(play_all(running, run, player, ROOT / "models" / "guess"))
        running.finish(run)
        compared = 0
        for step in range(1, steps + 1):
            for chunk in running.buffer.ReadPayloads(buffer_pb2.ReadPayloadsRequest(run_id=run, step=step)):
                for payload in chunk.payloads:
                    trained = Trajectory.FromString(payload)
                    key = trained.key
                    trace = traces[key.epoch, key.index, key.attempt, key.sample]
                    assert trace["ids"] == np.frombuffer(trained.token_ids, np.int32).tolist()
                    sampled = np.asarray(trace["sampled"], bool)
                    mask = np.frombuffer(trained.loss_mask, np.uint8).astype(bool)
                    assert (mask == sampled[-len(mask) :]).all() and not sampled[: -len(mask)].any()
                    logprobs = np.asarray(trace["logprobs"])[-len(mask) :]
                    np.testing.assert_allclose(np.frombuffer(trained.logprobs, np.float32)[-len(mask) :], logprobs, atol=1e-6)
                    compared += 1
        print(f"{compared} rollouts of verifiers 0.4 have the token ids and logprobs of their trajectories")
        assert compared == steps * GROUPS * SAMPLES
