"""The three ways to run a plugin pass ``plugintest``, and give the same rewards through the scorer
of a run."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollout.errors import RolloutError
from rollout.hosting import wire
from rollout.hosting.child import ChildProcess
from rollout.hosting.host import Source
from rollout.hosting.manifest import read_manifest
from rollout.hosting.runner import InProcess, Runner
from rollout.hosting.sidecar import Sidecar
from rollout.hosting.supervised import SupervisedSidecar
from rollout_testing import plugintest
from rollout_testing.go import go_program
from rollout_workers.rewards.plugin import PluginRewards
from rollout_workers.rewards.rewards import RewardGroup, Rewards, Scorable


@asynccontextmanager
async def in_process(sources: Sequence[Source]) -> AsyncIterator[Runner]:
    async with _started(InProcess(sources)) as runner:
        yield runner


@asynccontextmanager
async def child(sources: Sequence[Source]) -> AsyncIterator[Runner]:
    async with _started(ChildProcess(sources)) as runner:
        yield runner


@asynccontextmanager
async def sidecar(sources: Sequence[Source]) -> AsyncIterator[Runner]:
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/plugin.sock"
        named = [f"{source['kind']}={source['base_dir']}/{source['plugin']}" for source in sources]
        process = subprocess.Popen([sys.executable, "-m", "rollout.hosting.sidecar", *named, "--address", address])
        try:
            async with _started(Sidecar(address)) as runner:
                yield runner
        finally:
            process.kill()
            process.wait()


@asynccontextmanager
async def _started(runner: Runner) -> AsyncIterator[Runner]:
    await runner.start()
    try:
        yield runner
    finally:
        await runner.close()
        await runner.close()


@asynccontextmanager
async def go_sidecar(sources: Sequence[Source]) -> AsyncIterator[Runner]:
    folder = Path(sources[0]["base_dir"])
    manifest = folder / "plugin.toml"
    manifest.write_text(f'name = "score"\nversion = "1.0.0"\nkind = "reward"\ncommand = ["{go_program("plugintest")}"]\n')
    async with _started(SupervisedSidecar(read_manifest("plugin.toml:score", folder))) as runner:
        yield runner


WAYS = {"in process": in_process, "child": child, "sidecar": sidecar}


@pytest.mark.parametrize("case", plugintest.CASES)
async def test_go_sidecar(case: str, tmp_path: Path) -> None:
    await plugintest.run(case, go_sidecar, tmp_path)


@pytest.mark.parametrize("case", plugintest.CASES | plugintest.PYTHON_CASES)
@pytest.mark.parametrize("way", WAYS)
async def test_runner(way: str, case: str, tmp_path: Path) -> None:
    await plugintest.run(case, WAYS[way], tmp_path)


@pytest.mark.parametrize("way", WAYS)
async def test_a_run_scores_alike_each_way(way: str, tmp_path: Path) -> None:
    (tmp_path / "plugins.py").write_text(plugintest.PLUGINS)
    source = {"kind": "reward", "plugin": "plugins.py:score", "base_dir": str(tmp_path)}
    async with WAYS[way]([source]) as runner:
        rewards = Rewards(PluginRewards(runner), timeout_seconds=1.0, retries=0)
        groups = [RewardGroup(json.dumps({"do": word}).encode(), (Scorable("1+1=", "42"),)) for word in ("", "raise", "nan")]
        found = [results[0] for results in await rewards.score(groups)]
        assert [(r.outcome, r.reason, r.reward) for r in found] == [
            ("completed", "", 6.0),
            ("infra_failed", "REWARD_RAISED", 0.0),
            ("infra_failed", "REWARD_BAD_RESULT", 0.0),
        ]


@pytest.mark.parametrize("way", [InProcess, ChildProcess])
async def test_an_import_error_is_raised_at_the_start(way: type[InProcess] | type[ChildProcess], tmp_path: Path) -> None:
    with pytest.raises(RolloutError) as raised:
        await way([{"plugin": "nothing.py:score", "base_dir": str(tmp_path)}]).start()
    assert raised.value.reason == "REWARD_IMPORT" and "can't read nothing.py" in raised.value.message


async def test_a_sidecar_that_is_gone_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.hosting.sidecar._START_SECONDS", 0.2)
    with pytest.raises(wire.PluginUnavailable, match="does not answer"):
        await Sidecar(f"unix:{tmp_path}/none.sock").start()
