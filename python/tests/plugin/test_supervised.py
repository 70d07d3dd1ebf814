"""Sidecars that a worker supervises: they crash, block, leak, and answer wrongly."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import grpc
import pytest

from rollout.errors import RolloutError
from rollout.hosting import wire
from rollout.hosting.exchange import checked, split
from rollout.hosting.host import Host
from rollout.hosting.manifest import ManifestError, read_manifest
from rollout.hosting.sidecar import serve
from rollout.hosting.supervised import SupervisedSidecar, _sweep  # pyright: ignore[reportPrivateUsage]
from rollout.plugin.v1 import plugin_pb2 as pb
from rollout_testing.go import go_program
from rollout_testing.plugintest import rewards
from rollout_workers.rewards.plugin import SidecarReward
from rollout_workers.rewards.rewards import RewardGroup, Rewards, Scorable

PYTHON = """
import os, time

HERE = os.path.dirname(__file__)
kept = []

def score(samples):
    for sample in samples:
        word = sample.row.get("do")
        if word == "exit":
            os._exit(3)
        if word == "exit once" and not os.path.exists(f"{HERE}/once"):
            open(f"{HERE}/once", "w").close()
            os._exit(3)
        if word == "leak":
            kept.append(bytearray(200 << 20))
    return [1.0 for _ in samples]

async def blocks(samples):
    time.sleep(60)
"""

Opened = Callable[..., AbstractAsyncContextManager[SupervisedSidecar]]


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    @asynccontextmanager
    async def start(function: str = "score", version: str = "1.0.0", extra: str = "") -> AsyncIterator[SupervisedSidecar]:
        (tmp_path / "plugins.py").write_text(PYTHON)
        command = f'["python", "-m", "rollout.hosting.sidecar", "plugins.py:{function}", "--version", "{version}"]'
        text = f'name = "{function}"\nversion = "1.0.0"\nkind = "reward"\ncommand = {command}\n{extra}\n'
        (tmp_path / "plugin.toml").write_text(text)
        sidecar = SupervisedSidecar(read_manifest(f"plugin.toml:{function}", tmp_path, kind="reward"))
        try:
            await sidecar.start()
            yield sidecar
        finally:
            await sidecar.close()

    return start


def asked(*words: str) -> pb.RewardRequest:
    request = rewards(*words)
    request.plugin = ""
    return request


async def refused(sidecar: SupervisedSidecar, word: str, seconds: float = 60) -> RolloutError:
    with pytest.raises(RolloutError) as raised:
        await sidecar.call("Reward", asked(word), seconds)
    return raised.value


async def test_a_reward_that_its_process_did_not_survive_is_scored_by_the_next(opened: Opened) -> None:
    async with opened() as sidecar:
        scores = (await sidecar.call("Reward", asked("exit once"), 60)).scores
        assert [score.reward for score in scores] == [1.0, 1.0] and sidecar.starts == 2
        condition = sidecar.condition
        assert condition is not None and condition.reason == "PLUGIN_RESTARTING" and condition.name == "score"


async def test_a_reward_that_ends_each_process_fails_with_a_reason(opened: Opened) -> None:
    async with opened() as sidecar:
        error = await refused(sidecar, "exit")
        assert error.reason == "PLUGIN_EXITED" and sidecar.starts == 3
        assert (await sidecar.call("Reward", asked(""), 60)).scores, "the next call starts it again"


async def test_an_idle_process_that_is_killed_is_started_by_the_next_call(opened: Opened) -> None:
    async with opened() as sidecar:
        os.kill(sidecar.pid, signal.SIGKILL)
        assert (await sidecar.call("Reward", asked(""), 60)).scores and sidecar.starts == 2


async def test_a_process_that_blocks_is_ended_and_named(opened: Opened) -> None:
    async with opened("blocks") as sidecar:
        error = await refused(sidecar, "", 0.5)
        assert error.reason == "PLUGIN_BLOCKED" and sidecar.broken
        condition = sidecar.condition
        assert condition is not None and condition.reason == "PLUGIN_BLOCKED" and "health" in condition.text


async def test_a_process_that_leaks_is_replaced_between_calls(opened: Opened) -> None:
    async with opened(extra="memory_bytes = 200000000") as sidecar:
        pid = sidecar.pid
        assert (await sidecar.call("Reward", asked("leak"), 60)).scores
        condition = sidecar.condition
        assert condition is not None and condition.reason == "PLUGIN_LEAKS" and "the limit is 200 MB" in condition.text
        assert (await sidecar.call("Reward", asked(""), 60)).scores and sidecar.pid not in (0, pid)


async def test_the_handshake_must_fit_the_manifest(opened: Opened, tmp_path: Path) -> None:
    with pytest.raises(wire.PluginVersion, match=r"has version 2\.0\.0, its manifest 1\.0\.0"):
        async with opened(version="2.0.0"):
            pass
    (tmp_path / "plugin.toml").write_text(
        f'name = "other"\nversion = "1.0.0"\nkind = "reward"\ncommand = ["{go_program("plugintest")}"]\n'
    )
    sidecar = SupervisedSidecar(read_manifest("plugin.toml:other", tmp_path))
    with pytest.raises(wire.PluginUnknown, match=r"serves reward score, .* but no reward `other`"):
        await sidecar.start()
    await sidecar.close()


async def test_a_program_that_ends_at_once_is_reported(tmp_path: Path) -> None:
    (tmp_path / "plugin.toml").write_text('name = "x"\nversion = "1"\nkind = "reward"\ncommand = ["false"]\n')
    sidecar = SupervisedSidecar(read_manifest("plugin.toml:x", tmp_path))
    with pytest.raises(wire.PluginUnavailable, match="ended with exit code 1 before it served"):
        await sidecar.start()
    with pytest.raises(wire.PluginRestarting, match=r"did not start again within 0\.5 s"):
        await sidecar.call("Reward", asked(""), 0.5)
    await sidecar.close()


async def test_a_failure_keeps_its_type_in_the_scores_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "plugin.toml").write_text(
        f'name = "score"\nversion = "1.0.0"\nkind = "reward"\ncommand = ["{go_program("plugintest")}"]\n'
    )
    scorer = Rewards(SidecarReward("plugin.toml:score", str(tmp_path)), timeout_seconds=30.0, retries=0)
    await scorer.start()
    try:
        words = ("", "raise", "panic", "exit", "short", "nan")
        groups = [RewardGroup(f'{{"do": "{word}"}}'.encode(), (Scorable("1+1=", "42"), Scorable("1+1=", ""))) for word in words]
        found = [(await scorer.score([group]))[0][0] for group in groups]
    finally:
        await scorer.close()
    assert [(result.outcome, result.reason, result.reward) for result in found] == [
        ("completed", "", 6.0),
        ("infra_failed", "REWARD_RAISED", 0.0),
        ("infra_failed", "PLUGIN_PANICKED", 0.0),
        ("infra_failed", "PLUGIN_EXITED", 0.0),
        ("infra_failed", "REWARD_BAD_RESULT", 0.0),
        ("infra_failed", "REWARD_BAD_RESULT", 0.0),
    ]


async def test_an_address_is_connected_again(tmp_path: Path) -> None:
    socket = tmp_path / "plugin.sock"
    (tmp_path / "plugin.toml").write_text(f'name = "score"\nversion = "1.0.0"\nkind = "reward"\naddress = "unix:{socket}"\n')

    async def served() -> asyncio.subprocess.Process:
        env = {**os.environ, "ROLLOUT_PLUGIN_ADDRESS": f"unix:{socket}"}
        return await asyncio.create_subprocess_exec(go_program("plugintest"), stdin=asyncio.subprocess.PIPE, env=env)

    sidecar, process = SupervisedSidecar(read_manifest("plugin.toml:score", tmp_path)), await served()
    try:
        await sidecar.start()
        for _ in range(2):
            assert (await sidecar.call("Reward", rewards(""), 60)).scores
            process.kill()
            await process.communicate()
            socket.unlink(missing_ok=True)
            process = await served()
    finally:
        await sidecar.close()
        process.kill()
        await process.communicate()


def _certificate(folder: Path, name: str, issuer: str = "") -> None:
    """A key and a certificate for localhost; issuer: that signs it, itself without one."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{name}.key")
    subject = ("-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost")
    if not issuer:
        openssl(*new, "-x509", *subject, "-out", f"{name}.crt")
        return
    openssl(*new, *subject, "-out", f"{name}.csr")
    signed = ("-CA", f"{issuer}.crt", "-CAkey", f"{issuer}.key", "-CAcreateserial", "-copy_extensions", "copyall")
    openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.crt")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
async def test_an_address_with_tls_knows_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, issuer in (("ca", ""), ("other", ""), ("sidecar", "ca"), ("worker", "ca"), ("unknown", "other")):
        _certificate(tmp_path, name, issuer)
    (tmp_path / "plugins.py").write_text(PYTHON)
    key, certificate, ca = ((tmp_path / name).read_bytes() for name in ("sidecar.key", "sidecar.crt", "ca.crt"))
    credentials = grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)
    port = free_port()
    host = Host.load([{"plugin": "plugins.py:score", "base_dir": str(tmp_path)}])
    server = await serve(host, f"localhost:{port}", credentials)
    try:
        for name, served in (("worker", True), ("unknown", False)):
            tls = f'[tls]\nca = "ca.crt"\ncert = "{name}.crt"\nkey = "{name}.key"\n'
            text = f'name = "score"\nversion = "1"\nkind = "reward"\naddress = "localhost:{port}"\nstart_seconds = 5\n{tls}'
            (tmp_path / "plugin.toml").write_text(text)
            sidecar = SupervisedSidecar(read_manifest("plugin.toml:score", tmp_path))
            if served:
                await sidecar.start()
                assert (await sidecar.call("Reward", asked(""), 60)).scores
            else:
                with pytest.raises(wire.PluginUnavailable, match="does not answer"):
                    await sidecar.start()
            await sidecar.close()
    finally:
        await server.stop(None)


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def test_requests_are_split_and_wrong_answers_refused() -> None:
    parts = split("Reward", asked("a", "b", "c"), 3)
    assert [[len(group.samples) for group in part.groups] for part in parts] == [[2], [2], [2]]
    parts = split("Reward", asked("a", "b", "c"), 4)
    assert [[len(group.samples) for group in part.groups] for part in parts] == [[2, 2], [2]]
    assert [len(part.calls) for part in split("CallTool", pb.CallToolRequest(calls=[pb.ToolCall(tool="x")] * 5), 2)] == [2, 2, 1]
    score, one = pb.RewardScore, asked("")
    del one.groups[0].samples[1]
    wrong = {
        "2 scores for 1 samples": [score(), score()],
        "inf as a reward": [score(reward=float("inf"))],
        "nan as the metric `x`": [score(metrics={"x": float("nan")})],
        "3 token_rewards for 2 tokens": [score(token_rewards=[1, 2, 3])],
        "a step \\[1, 9\\)": [score(steps=[pb.StepReward(start=1, end=9, reward=1)])],
    }
    for message, scores in wrong.items():
        with pytest.raises(RolloutError, match=message):
            checked("`x`", "Reward", one, pb.RewardResponse(scores=scores))
    turn = pb.EnvironmentTurn(task=pb.EnvironmentTask(key="t"), number=0)
    for answer in (
        pb.EnvironmentAnswer(),
        pb.EnvironmentAnswer(observation=pb.EnvironmentObservation(messages=["{"])),
        pb.EnvironmentAnswer(result=pb.EnvironmentResult()),
    ):
        response = pb.StepEnvironmentResponse(answers=[answer])
        [found] = checked("`x`", "StepEnvironment", pb.StepEnvironmentRequest(turns=[turn]), response).answers
        assert found.result.reason == "ENVIRONMENT_BAD_RESULT"


GOOD = 'name = "x"\nversion = "1.0"\nkind = "reward"\ncommand = ["true"]\n'
WRONG = {
    GOOD + "typo = 1": "plugin.toml:5:1: `typo` is unknown; the keys of a manifest are: name, version",
    GOOD.replace('"x"', "3"): "plugin.toml:1:1: plugin.toml: `name` is 3, not a text",
    GOOD.replace('"x"', '"a-b"'): "plugin.toml:1:1: the name 'a-b' is not an identifier",
    GOOD.replace('"x"', '"y"'): "plugin.toml:1:1: plugin.toml is the manifest of `y`, not of `x`; write `plugin.toml:y`",
    GOOD.replace('"1.0"', '"new"'): "plugin.toml:2:1: the version 'new' does not begin with numbers",
    GOOD.replace("reward", "rewards"): "plugin.toml:3:1: the kind 'rewards' is unknown; write one of: reward, environment, tool",
    GOOD.replace("reward", "loss"): "plugin.toml:3:1: a plugin of the kind loss works in process only, so it can't be a sidecar; "
    "write it in Python, and add the entry point `loss.x` to its package",
    GOOD.replace("reward", "advantage"): "plugin.toml:3:1: a plugin of the kind advantage works in process only",
    GOOD.replace("reward", "tool"): "plugin.toml:3:1: `x` is of the kind tool, but the configuration uses it as reward",
    GOOD + "protocol = 2": "plugin.toml:5:1: the plugin needs version 2 of rollout.plugin.v1, this rollout speaks 1",
    GOOD.replace("true", "./none"): "plugin.toml:4:1: the program ./none does not exist or can't be executed; build it",
    GOOD.replace('"true"', '"no-such-program"'): "plugin.toml:4:1: the program `no-such-program` is not on PATH",
    GOOD + 'address = "unix:/x"': "plugin.toml:5:1: plugin.toml has both `command` and `address`",
    GOOD.replace("command", "# command"): "plugin.toml has neither `command` nor `address`",
    GOOD.replace('command = ["true"]', 'address = "far:1"'): "plugin.toml:4:1: far:1 is on another host, and there is no [tls]",
    GOOD + 'files = ["*.go"]': "plugin.toml:5:1: `files` has '*.go', and no file matches it",
    GOOD + "memory_bytes = 1": "plugin.toml:5:1: `memory_bytes` is 1; write a number of at least",
    GOOD + "[tls]": "plugin.toml:5:1: [tls] is only for an `address` with host and port",
    GOOD + "kind = \n": "plugin.toml:5:1: plugin.toml is not TOML",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_manifest_is_reported_with_line_and_fix(text: str, tmp_path: Path) -> None:
    (tmp_path / "plugin.toml").write_text(text)
    with pytest.raises(ManifestError, match=re.escape(WRONG[text])) as raised:
        read_manifest("plugin.toml:x", tmp_path, kind="reward")
    assert raised.value.fix


def test_a_manifest_names_the_files_that_the_plan_pins(tmp_path: Path) -> None:
    for name in ("main.js", "lib/a.js", "README"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "plugin.toml").write_text(GOOD.replace('"true"', '"true", "main.js"') + 'files = ["lib/*.js"]\n')
    found = read_manifest("plugin.toml:x", tmp_path).files
    assert [str(path.relative_to(tmp_path)) for path in found] == ["lib/a.js", "main.js", "plugin.toml"]


def test_folders_of_other_programs_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those of workers that have ended are removed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    other, alive, dead = (tmp_path / f"rollout-plugin-{name}" for name in ("3000000000", f"{os.getpid()}-x", "4194303-x"))
    for folder in (other, alive, dead):
        folder.mkdir()
    _sweep()
    assert other.exists() and alive.exists() and not dead.exists()
