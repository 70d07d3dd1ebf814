"""Environments of packages, each with its real package (`make check-environments`)."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.environment import ChildTurns, Observation, Refusal, Result, Task, Turn
from rollout.environments import FOLDER, PLUGINS
from rollout.environments.install import InstallFailed, install
from rollout_testing.mcptest import McpSuite, begin, call, opened
from rollout_workers.environments.hosted import Hosted

ROOT = Path(__file__).resolve().parent.parent
LAKE = {
    "id": "FrozenLake-v1",
    "kwargs": {"is_slippery": False, "desc": ["SFF", "FHF", "FFG"]},
    "actions": ["left", "down", "right", "up"],
}


@pytest.fixture(scope="module")
def interpreter() -> Callable[[str], str]:
    """Install the package of a kind once, and return its Python."""
    return lambda kind: str(install(kind, ROOT / ".tools" / "plugins" / kind))


@pytest.fixture
def hosted(interpreter: Callable[[str], str]) -> Callable[..., Hosted]:
    """Build an environment of a kind with these arguments."""

    def build(kind: str, **arguments: Any) -> Hosted:
        source = {"kind": "environment", "plugin": PLUGINS[kind], "base_dir": FOLDER, "args": json.dumps(arguments)}
        return Hosted(source, processes=1, command=(interpreter(kind),))

    return build


def task(key: str = "t", samples: int = 2, row: dict[str, Any] | None = None) -> Task:
    return Task(key, json.dumps(row or {"seed": 1}).encode(), tuple(range(samples)), tuple(range(samples)))


def turn(of: Task, sample: int, number: int, text: str) -> Turn:
    return Turn(of, sample, number, "", np.zeros(1, np.int32), text, False, content=text)


async def play(environment: Hosted, of: Task, scripts: dict[int, list[str]]) -> dict[int, list[Observation | Result]]:
    """Play the samples concurrently, each with its own actions."""

    async def episode(sample: int, actions: list[str]) -> list[Observation | Result]:
        answers: list[Observation | Result] = []
        for number, action in enumerate(actions):
            [answer] = await environment.step([turn(of, sample, number, action)])
            assert not isinstance(answer, ChildTurns)
            answers.append(answer)
        return answers

    found = await asyncio.gather(*(episode(sample, actions) for sample, actions in scripts.items()))
    return dict(zip(scripts, found, strict=True))


@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
async def test_episodes_of_a_vector_environment_end_on_their_own(hosted: Callable[..., Hosted], autoreset: str) -> None:
    lake, group = hosted("gymnasium", **LAKE, autoreset=autoreset), task(samples=3)
    await lake.start()
    try:
        first = (await lake.reset([group]))[0]
        assert isinstance(first, Observation) and first.text == "0"
        got = await play(lake, group, {
            0: ["I go right", "right", "down", "down"],  # reaches the goal
            1: ["down", "right"],  # falls into the hole, and its place is reset while the others continue
            2: ["right", "left", "down", "down", "right", "right"],
        })  # fmt: skip
    finally:
        await lake.shutdown()
    texts = {sample: [a.text if isinstance(a, Observation) else a.reward for a in answers] for sample, answers in got.items()}
    assert texts == {0: ["1", "2", "5", 1.0], 1: ["3", 0.0], 2: ["1", "0", "3", "6", "7", 1.0]}


async def test_a_turn_without_an_action_is_repeated_and_a_closed_episode_holds_no_other(hosted: Callable[..., Hosted]) -> None:
    lake, group = hosted("gymnasium", **LAKE, invalid_reward=-0.1), task()
    await lake.start()
    try:
        await lake.reset([group])
        said = (await lake.step([turn(group, 0, 0, "north")]))[0]
        assert isinstance(said, Observation) and said.reward == pytest.approx(-0.1) and said.metrics == {"invalid_actions": 1.0}
        assert said.text == "That is not an action. Write one of: left or down or right or up."
        waiting = asyncio.create_task(lake.step([turn(group, 0, 1, "right")]))
        done, _ = await asyncio.wait([waiting], timeout=0.5)
        assert not done, "the other episode has no action yet"
        await lake.close([("t", 1)])
        async with asyncio.timeout(60):
            moved = (await waiting)[0]
        assert isinstance(moved, Observation) and moved.text == "1"
    finally:
        await lake.shutdown()


async def test_numbers_are_actions_of_a_discrete_space_and_time_limits_truncate(hosted: Callable[..., Hosted]) -> None:
    pole, group = hosted("gymnasium", id="CartPole-v1", kwargs={"max_episode_steps": 3}), task(samples=1, row={"seed": 7})
    await pole.start()
    try:
        first = (await pole.reset([group]))[0]
        assert isinstance(first, Observation) and first.text.startswith("[") and first.text.count(",") == 3
        answers = (await play(pole, group, {0: ["1", "action 0", "1"]}))[0]
    finally:
        await pole.shutdown()
    last = answers[-1]
    assert [answer.reward for answer in answers] == [1.0, 1.0, 1.0]
    assert isinstance(last, Result) and last.outcome == "truncated"


async def test_reasoning_gym_scores_the_answer_inside_the_tags(hosted: Callable[..., Hosted]) -> None:
    sums = hosted("reasoning_gym", dataset="basic_arithmetic", size=20, seed=3, config={"min_terms": 2, "max_terms": 2})
    await sums.start()
    try:
        starts = await sums.reset([task("a", row={"index": 4}), task("b", row={"index": 20})])
        assert isinstance(starts[0], Observation) and isinstance(starts[1], Refusal)
        assert starts[1].message == "`index` is 20, not the number of a question from 0 to 19"
        question = starts[0].text
        value = str(eval("".join(c for c in question if c in "0123456789+-*/")))  # a question of the package
        right, wrong = await sums.step(
            [turn(task("a"), 0, 0, f"I think <answer>{value}</answer>"), turn(task("a"), 1, 0, "<answer>x</answer>")]
        )
    finally:
        await sums.shutdown()
    assert isinstance(right, Result) and right.reward == 1.0 and right.metrics == {"exact": 1.0}
    assert isinstance(wrong, Result) and wrong.reward < 0.1 and wrong.metrics == {"exact": 0.0}


@pytest.fixture(scope="module", params=["1.x", "2.x"])
def mcp_command(request: pytest.FixtureRequest, interpreter: Callable[[str], str]) -> list[str]:
    """The command of a server of each major version of the package mcp."""
    server = str(ROOT / "e2e" / "mcp_server.py")
    if request.param == "2.x":
        return [interpreter("mcp"), server]
    folder = ROOT / ".tools" / "mcp-1"
    python = folder / "bin" / "python"
    if not python.exists():
        uv = str(ROOT / ".venv/bin/uv")
        subprocess.run([uv, "venv", "--quiet", "--python", str(ROOT / ".venv/bin/python"), str(folder)], check=True)
        lock = str(ROOT / "e2e/clients/locks/mcp-1.lock")
        subprocess.run([uv, "pip", "install", "--quiet", "--python", str(python), "--require-hashes", "-r", lock], check=True)
    return [str(python), server]


class TestMcpServers(McpSuite):
    @pytest.fixture(autouse=True)
    def _server(self, mcp_command: list[str]) -> None:
        self.command = mcp_command

    async def test_streamable_http(self) -> None:
        process = await asyncio.create_subprocess_exec(*self.command, "--http", stdout=asyncio.subprocess.PIPE)
        try:
            assert process.stdout is not None
            port = int(await process.stdout.readline())
            async with opened(60.0, capitals={"url": f"http://127.0.0.1:{port}/mcp", "start_seconds": 120}) as environment:
                await begin(environment)
                assert await call(environment, "lookup", country="bali") == "moru"
                assert "unknown country oslo" in str(await call(environment, "lookup", country="oslo"))
        finally:
            process.kill()
            await process.wait()


def test_an_install_deletes_no_files_of_others(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(InstallFailed, match="has other files, which would be lost"):
        install("gymnasium", tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def plan(folder: Path, config: str, interpreter: str) -> str:
    """What `rollout plan` says of the FrozenLake example with changed lines."""
    subprocess.run([str(ROOT / ".venv/bin/python"), str(ROOT / "examples/addition/prepare.py")], check=True, capture_output=True)
    file = ROOT / "examples/environments" / f".{folder.name}.toml"
    file.write_text(config.replace("../../plugins/gymnasium/bin/python", interpreter))
    try:
        command = [str(ROOT / "bin/rollout"), "plan", "--config", str(file), "--output", str(folder / "plan.lock")]
        done = subprocess.run([*command, "--state-dir", str(folder / "state")], capture_output=True, text=True, check=False)
        subprocess.run(
            [str(ROOT / "bin/rollout"), "daemon", "stop", "--state-dir", str(folder / "state")], check=False, capture_output=True
        )
        return done.stdout + done.stderr
    finally:
        file.unlink()


def test_the_plan_reports_a_missing_package_and_wrong_arguments(tmp_path: Path, interpreter: Callable[[str], str]) -> None:
    example = (ROOT / "examples/environments/frozen_lake.toml").read_text()
    (first := tmp_path / "missing").mkdir()
    said = plan(first, example.replace('python = "../../plugins/gymnasium/bin/python"\n', ""), "")
    assert "No module named 'gymnasium'" in said and "rollout plugin install gymnasium" in said, said
    (second := tmp_path / "unknown").mkdir()
    said = plan(second, example.replace("FrozenLake-v1", "FrozenLac-v1"), interpreter("gymnasium"))
    assert "gymnasium can't make 'FrozenLac-v1'" in said and "environment.args" in said, said


def test_a_policy_learns_frozen_lake(tmp_path: Path, interpreter: Callable[[str], str]) -> None:
    subprocess.run([str(ROOT / ".venv/bin/python"), str(ROOT / "examples/addition/prepare.py")], check=True, capture_output=True)
    state = ["--state-dir", str(tmp_path / "state")]
    run = [str(ROOT / "bin/rollout"), "run", "--config", str(ROOT / "examples/environments/frozen_lake.toml"), *state]
    try:
        python = f'environment.python="{interpreter("gymnasium")}"'
        done = subprocess.run(
            [*run, "--set", python, "--set", "train.steps=40"], text=True, capture_output=True, timeout=280, check=False
        )
    finally:
        subprocess.run([str(ROOT / "bin/rollout"), "daemon", "stop", *state], check=False, capture_output=True)
    said = done.stdout + done.stderr
    rewards = [float(value) for value in re.findall(r"step [0-9]+/40  reward (-?[0-9.]+)", said)]
    assert done.returncode == 0 and len(rewards) == 40, said
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.5, rewards


@pytest.mark.parametrize("example", ["tools", "mcp"])
def test_a_policy_learns_to_use_a_tool(tmp_path: Path, interpreter: Callable[[str], str], example: str) -> None:
    folder = ROOT / "examples" / example
    subprocess.run([str(ROOT / ".venv/bin/python"), str(folder / "prepare.py")], check=True, capture_output=True)
    state = ["--state-dir", str(tmp_path / "state")]

    def train(config: str, *arguments: str) -> str:
        command = [str(ROOT / "bin/rollout"), "run", "--config", str(folder / config), *state, *arguments]
        done = subprocess.run(command, text=True, capture_output=True, timeout=280, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    try:
        train("sft.toml")
        warm = {"tools": "calculator-sft", "mcp": "capitals-sft"}[example]
        python = ["--set", f'environment.python="{interpreter("mcp")}"'] if example == "mcp" else []
        said = train("grpo.toml", "--from", warm, "--set", "train.steps=40", *python)
    finally:
        subprocess.run([str(ROOT / "bin/rollout"), "daemon", "stop", *state], check=False, capture_output=True)
    evaluations = [float(value) for value in re.findall(r"eval after step [0-9]+  reward ([0-9.]+)", said)]
    assert len(evaluations) == 3 and evaluations[-1] > evaluations[0] + 0.2, said
