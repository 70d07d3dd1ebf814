"""Plugins of installed packages: a folder of ``sys.path`` with the metadata of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from rollout.config.v1.run_config_pb2 import RewardConfig
from rollout.errors import RolloutError
from rollout.hosting.host import Host
from rollout.hosting.scorers import kind_of
from rollout.plan.v1.plan_pb2 import PluginPackage
from rollout.plugin import Sample, call_reward, load_reward
from rollout.plugin.installed import Installed, PluginChanged, installed, is_installed, load_installed, package
from rollout_plugins.command import command
from rollout_workers.environments.hosted import Hosted
from rollout_workers.environments.tools import Tools
from rollout_workers.rewards.config import scorer_of
from rollout_workers.rewards.pinned import Pinned
from rollout_workers.rewards.plugin import RewardPool, SidecarReward
from rollout_workers.rewards.rewards import RewardGroup, Scorable

ENTRIES = "[rollout.plugins]\nreward.length = acme_code:length\ntool.add = acme_code:add\nbad = acme_code:add\n"
CODE = """def length(samples):
    return [float(len(s.completion)) for s in samples]

def add(a: int, b: int) -> int:
    return a + b
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    info = tmp_path / "acme_code-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Acme_Code\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    (info / "RECORD").write_text("acme_code.py,,\nacme_code-1.2.dist-info/METADATA,,\n")
    (tmp_path / "acme_code.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("acme_code", None)


def test_a_package_names_its_plugins_without_an_import(site: Path) -> None:
    ours = [one for one in installed() if one.distribution == "acme-code"]
    assert [(one.kind, one.name, one.version) for one in ours] == [
        ("", "bad", "1.2"),
        ("reward", "length", "1.2"),
        ("tool", "add", "1.2"),
    ]
    assert ours[0].problem.startswith("the entry point `bad` is not `KIND.NAME`") and "acme_code" not in sys.modules
    assert ours[1] == Installed("reward", "length", "acme-code", "1.2", "acme_code:length")


def test_a_plugin_of_a_package_is_called_like_one_of_a_file(site: Path) -> None:
    reward = load_reward("acme-code:length")
    assert [score.reward for score in call_reward(reward, [Sample("p", "abc", {})])] == [3.0]
    host = Host.load([{"kind": "tool", "plugin": "acme_code:add"}])  # names are compared normalized
    assert list(host._plugins) == [("tool", "add")]  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(RolloutError) as raised:
        load_installed("acme-code:add", "reward")
    assert raised.value.reason == "PLUGIN_ENTRY_POINT" and "the entry point `bad`" in raised.value.message


@pytest.mark.parametrize(
    ("plugin", "named"),
    [
        ("acme-code:add", True),
        ("acme.code:add", True),
        ("r.py:f", False),
        ("p.toml:f", False),
        ("a/b:f", False),
        ("acme", False),
        (":f", False),
    ],
)
def test_what_names_a_package(plugin: str, named: bool) -> None:
    assert is_installed(plugin) is named


def test_the_digest_is_that_of_the_files(site: Path) -> None:
    first = package("acme-code:length", "reward")
    assert (first.name, first.version) == ("acme-code", "1.2")
    (site / "acme_code-1.2.dist-info" / "INSTALLER").write_text("uv")
    assert package("acme-code:length", "reward") == first
    (site / "acme_code.py").write_text(CODE + "\n")
    assert package("acme-code:length", "reward").digest != first.digest


def test_an_editable_package_has_the_digest_of_its_sources(site: Path) -> None:
    info = site / "acme_code-1.2.dist-info"
    (info / "RECORD").write_text("acme_code-1.2.dist-info/METADATA,,\n")
    (info / "direct_url.json").write_text('{"url": "file:///acme", "dir_info": {"editable": true}}')
    first = package("acme-code:length", "reward")
    (site / "acme_code.py").write_text(CODE + "\n")
    assert package("acme-code:length", "reward").digest != first.digest


async def test_a_worker_refuses_a_changed_package(site: Path) -> None:
    found = package("acme-code:length", "reward")
    changes: list[str] = []

    def pinned(kind: str = "reward", version: str = "1.2") -> Pinned:
        entry = PluginPackage(name=found.name, version=version, digest=found.digest, kinds=[kind])
        return Pinned([], str(site), changes.append, plugins=[entry])

    await pinned().verify_running()
    (site / "acme_code.py").write_text(CODE + "\n")
    with pytest.raises(PluginChanged, match=r"the files of acme-code 1\.2 have changed since the run was planned"):
        await pinned().verify_running()
    assert len(changes) == 1 and PluginChanged.permanent
    with pytest.raises(PluginChanged, match=r"the plan has plugins of acme-code 1\.1, but 1\.2 is installed"):
        pinned(version="1.1").verify()
    pinned("tool").verify()  # not of the reward


async def test_files_are_verified_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package may have thousands of files, and calls of other plugins must not wait for them."""
    threads: list[str] = []
    monkeypatch.setattr(Pinned, "verify", lambda _: threads.append(threading.current_thread().name))
    (tmp_path / "plugin.toml").write_text('name = "f"\nversion = "1"\nkind = "reward"\ncommand = ["true"]\n')
    (tmp_path / "r.py").write_text("def f(samples): return [1.0]\n")
    pinned = Pinned([], str(tmp_path), pytest.fail)
    pool = RewardPool({"kind": "reward", "plugin": "r.py:f", "base_dir": str(tmp_path)}, pinned)
    sidecar = SidecarReward("plugin.toml:f", str(tmp_path), pinned)
    hosted = Hosted({"kind": "environment", "plugin": "r.py:E", "base_dir": str(tmp_path)}, verify=pinned.verify_running)
    tools = Tools(cast(Any, None), cast(Any, None), [], pinned.verify_running)
    await pool.start()
    await tools.start()
    with pytest.raises(RolloutError):  # it serves nothing
        await sidecar.start()
    with pytest.raises(RolloutError):  # the file has no E
        await hosted.start()
    for source in (pool, sidecar):
        await source.close()
    await hosted.shutdown()
    assert len(threads) == 4 and threading.main_thread().name not in threads, threads


def test_a_wheel_is_installed_and_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """pip installs into another folder than that of the tests."""
    name = "acme_wheel-2.0-py3-none-any.whl"
    files = {
        "acme_wheel.py": CODE,
        "acme_wheel-2.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: acme-wheel\nVersion: 2.0\n",
        "acme_wheel-2.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "acme_wheel-2.0.dist-info/entry_points.txt": ENTRIES.replace("acme_code", "acme_wheel").replace(
            "bad = acme_wheel:add\n", ""
        ),
    }
    with zipfile.ZipFile(tmp_path / name, "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
        wheel.writestr("acme_wheel-2.0.dist-info/RECORD", "".join(f"{path},,\n" for path in files))
    target = tmp_path / "site"
    monkeypatch.setenv("PIP_TARGET", str(target))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.syspath_prepend(target)
    spec = tmp_path / "request.json"
    spec.write_text(json.dumps({"install": name, "base_dir": str(tmp_path), "folder": ""}))
    assert command(str(spec)) == 0
    answer = json.loads(capfd.readouterr().out)
    assert answer["package"]["version"] == "2.0"
    assert [(one["kind"], one["use"]) for one in answer["plugins"]] == [
        ("reward", "acme-wheel:length"),
        ("tool", "acme-wheel:add"),
    ]
    spec.write_text(json.dumps({"list": True, "folder": str(tmp_path)}))
    assert command(str(spec)) == 0
    [listed] = [one for one in json.loads(capfd.readouterr().out)["plugins"] if one["name"] == "length"]
    assert listed["from"] == "package" and listed["digest"] == answer["package"]["digest"] and not listed["problem"]
    spec.write_text(json.dumps({"install": "./absent.whl", "base_dir": str(tmp_path), "folder": ""}))
    assert command(str(spec)) == 1
    error = json.loads(capfd.readouterr().out)["error"]
    assert error["reason"] == "PLUGIN_INSTALL" and error["message"].startswith("can't install ./absent.whl: pip ended with code")


def test_the_program_answers_an_unknown_request(tmp_path: Path) -> None:
    spec = tmp_path / "request.json"
    spec.write_text('{"bake": 1}')
    done = subprocess.run([sys.executable, "-m", "rollout_plugins", "plugin", "--spec", spec], capture_output=True, text=True)
    assert (
        done.returncode == 1 and "has none of list, new, test, install: ['bake']" in json.loads(done.stdout)["error"]["message"]
    )


async def test_an_evaluation_scores_suites_only(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *sys.path]))  # of the child process
    entries = "[rollout.plugins]\nevaluation.length = acme_code:length\n"
    (site / "acme_code-1.2.dist-info" / "entry_points.txt").write_text(entries)
    (site / "length.toml").write_text('name = "length"\nversion = "1"\nkind = "evaluation"\ncommand = ["true"]\n')
    for plugin in ("acme-code:length", "length.toml:length"):
        assert kind_of(plugin, site, evaluates=True) == "evaluation" and kind_of(plugin, site, evaluates=False) == "reward"
    assert kind_of("acme_code.py:length", site, evaluates=True) == "reward"
    config = RewardConfig(plugin="acme-code:length", timeout_seconds=30)
    scorer = scorer_of(config, str(site), lambda _: pytest.fail("no reward model"), evaluates=True)
    await scorer.start()
    try:
        scored = await scorer.score([RewardGroup(b"{}", (Scorable("", "abc"),))])
    finally:
        await scorer.close()
    assert [result.reward for group in scored for result in group] == [3.0]
    with pytest.raises(RolloutError, match="has no reward `length`"):
        await scorer_of(config, str(site), lambda _: pytest.fail("no reward model")).start()
