"""``rollout plugin new`` makes plugins whose tests pass, and ``rollout plugin test`` finds what is
wrong with one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.errors import RolloutError
from rollout.plugin.installed import KINDS
from rollout_plugins.scaffold import ScaffoldRefused, new
from rollout_plugins.testing import check

ROOT = Path(__file__).resolve().parents[3]
GO_KINDS = ("reward", "environment", "tool", "evaluation", "data_source")


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_plugin_passes(kind: str, tmp_path: Path) -> None:
    made = new(kind, "example", "python", str(tmp_path))
    report = check(made["plugin"], base_dir=made["folder"], kind=kind)
    assert report.passed, report
    assert [one.check for one in report.verdicts] == [
        "network", "load", "golden", "determinism", "batches", "bad inputs", "timing", "memory",
    ]  # fmt: skip
    assert report.seconds < 60
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length=120", "--select", "E,F,I,UP,B", made["folder"]]
    assert subprocess.run(command).returncode == 0


def test_the_test_of_a_new_plugin_passes_and_fails(tmp_path: Path) -> None:
    made = new("reward", "example", "python", str(tmp_path))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", made["folder"]]
    assert subprocess.run(command, cwd=tmp_path).returncode == 0
    code = Path(made["folder"], "example.py")
    code.write_text(code.read_text().replace("found[-1]", "found[0] + '0'"))
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "sample 1: `reward` is 0.0, expected 1.0" in done.stdout, done.stdout


def test_new_plugins_in_go_pass(tmp_path: Path) -> None:
    """Their modules use this checkout through a workspace."""
    for kind in GO_KINDS:
        commands = new(kind, f"a_{kind}", "go", str(tmp_path))["commands"]
        assert commands[1].startswith("go mod edit -replace=") and f"{ROOT / 'libs'} -replace=" in commands[1], commands
    used = [f"./a_{kind}" for kind in GO_KINDS] + [str(ROOT / module) for module in ("proto", "database", "libs")]
    (tmp_path / "go.work").write_text("go 1.26.7\nuse (\n" + "".join(f"\t{folder}\n" for folder in used) + ")\n")
    (tmp_path / "go.work.sum").write_bytes((ROOT / "go.work.sum").read_bytes())
    for kind in GO_KINDS:
        name = f"a_{kind}"
        subprocess.run(["go", "build", "-o", name, "."], cwd=tmp_path / name, check=True, env=os.environ | {"GOFLAGS": ""})
    tested = subprocess.run(
        ["go", "test", *used[: len(GO_KINDS)]], cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"GOFLAGS": ""}
    )
    assert tested.returncode == 0 and tested.stdout.count("ok") == len(GO_KINDS), tested.stdout + tested.stderr
    for kind in GO_KINDS:
        report = check(f"plugin.toml:a_{kind}", base_dir=tmp_path / f"a_{kind}")
        assert report.passed and report.kind == kind, report


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rewad", "x", "python"), "the kind `rewad` is unknown; write one of: reward, environment, tool, evaluation, "),
        (("reward", "Word-Count", "python"), "the name 'Word-Count' is not an identifier in lower case; use letters"),
        (("reward", "class", "python"), "the name 'class' is not an identifier in lower case"),
        (("reward", "x", "rust"), "there is no template in 'rust'; write `--language python` or `--language go`"),
        (("loss", "x", "go"), "a plugin of the kind loss runs in the learner, in Python; leave out `--language go`"),
        (("reward", "full", "python"), "/full has files, which would be lost; choose another name"),
    ],
)
def test_a_plugin_that_can_not_be_made(arguments: tuple[str, str, str], message: str, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    with pytest.raises(ScaffoldRefused) as raised:
        new(*arguments, str(tmp_path))
    assert message in str(raised.value)


SAMPLE = {"completion": "2", "row": {"answer": "2"}, "reward": 1.0}
WRONG = {
    "golden": ("def f(samples):\n    return [0.5] * len(samples)\n", "sample 1: `reward` is 0.5, expected 1.0"),
    "determinism": (
        "calls = []\ndef f(samples):\n    calls.append(0)\n    return [1.0 / len(calls)] * len(samples)\n",
        'sample 1: {"reward": 0.5, "metrics": {}}, then {"reward": 0.3333333333333333, "metrics": {}} in the second call',
    ),
    "batches": (
        "def f(samples):\n    return [1.0 if len(samples) < 64 else 0.0] * len(samples)\n",
        "in a batch of 64: answer 1 is 0.0, expected 1.0",
    ),
    "bad inputs": (
        "import os\ndef f(samples):\n    if not samples[0].completion:\n        os._exit(3)\n    return [1.0] * len(samples)\n",
        "an empty completion ended its process",
    ),
    "timing": (
        "import time\ndef f(samples):\n    time.sleep(0.02 * len(samples))\n    return [1.0] * len(samples)\n",
        "a call of 64 takes",
    ),
    "memory": (
        "kept = []\ndef f(samples):\n    kept.append(bytearray(1 << 20))\n    return [1.0] * len(samples)\n",
        "it leaks",
    ),
    "load": ("import absent_module\n", "REWARD_IMPORT: "),
}


@pytest.mark.parametrize("which", WRONG)
def test_what_is_wrong_has_a_verdict(which: str, tmp_path: Path) -> None:
    code, message = WRONG[which]
    (tmp_path / "bad.py").write_text(code)
    (tmp_path / "samples.jsonl").write_text(json.dumps(SAMPLE) + "\n")
    report = check("bad.py:f", base_dir=tmp_path, kind="reward", timeout=2.0)
    assert not report.passed
    [failed] = [one for one in report.verdicts if one.verdict == "fail"]
    assert failed.check == which and message in failed.detail and failed.fix, report


NETWORK = "import socket\ndef f(samples):\n    socket.create_connection(('192.0.2.1', 80), 5)\n    return [1.0] * len(samples)\n"
ORDINARY = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]  # reads the files of root


@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces")
@pytest.mark.parametrize("user", ["own", "ordinary"])
def test_a_plugin_has_no_network(user: str, tmp_path: Path) -> None:
    """Also that of an ordinary user, whose process must have one thread when the network is cut
    off."""
    root = os.getuid() == 0
    command = [*ORDINARY] if root and user == "ordinary" else []
    if subprocess.run([*command, "unshare", "--net", *([] if root and not command else ["--user"]), "true"]).returncode:
        pytest.skip("this system allows no network namespaces")
    (tmp_path / "net.py").write_text(NETWORK)
    (tmp_path / "samples.jsonl").write_text(json.dumps(SAMPLE) + "\n")
    request = {"test": "net.py:f", "base_dir": str(tmp_path), "kind": "reward", "samples": "", "timeout": 10.0}
    (tmp_path / "request.json").write_text(json.dumps(request))
    command += [sys.executable, "-m", "rollout_plugins", "plugin", "--spec", f"{tmp_path}/request.json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    verdicts = json.loads(done.stdout)["report"]["verdicts"]
    assert (verdicts[0]["check"], verdicts[0]["verdict"]) == ("network", "pass"), verdicts
    assert verdicts[2]["verdict"] == "fail", verdicts
    assert "Network is unreachable" in verdicts[2]["detail"] and "net.py:3" in verdicts[2]["detail"]


@pytest.mark.skipif(not Path("/proc/sys/user").exists(), reason="namespaces")
def test_a_system_without_namespaces_is_named() -> None:
    """The process is left as it is."""
    code = (
        "import errno, os\nfrom rollout_plugins import isolation\n"
        "def refused():\n    os.chdir('/proc')\n    raise OSError(errno.EPERM, '')\n"
        "isolation._enter = refused\nprint(isolation.cut_off_network(), os.getcwd())"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, cwd="/", text=True)
    assert done.stdout == "a network namespace can't be made: Operation not permitted /\n"


@pytest.mark.parametrize(
    ("samples", "plugin", "reason", "message"),
    [
        (None, "r.py:f", "PLUGIN_SAMPLES", "r.py:f has no golden samples: there is no f.samples.jsonl or samples.jsonl in "),
        (None, "none.py:f", "REWARD_IMPORT", "can't read none.py: there is no such file in "),
        (None, "none.toml:f", "PLUGIN_MANIFEST", "can't read none.toml: No such file or directory"),
        (None, "acme:f", "PLUGIN_NOT_INSTALLED", "no installed package has acme:f"),
        ("", "r.py:f", "PLUGIN_SAMPLES", "samples.jsonl has no samples"),
        ("[1]\n", "r.py:f", "PLUGIN_SAMPLES", "samples.jsonl:1 is not a JSON object"),
        ("{}\n", "plugin.toml:f", "PLUGIN_MANIFEST", "can't read plugin.toml: No such file or directory"),
        ("{}\n", "acme:f", "PLUGIN_NOT_INSTALLED", "no installed package has acme:f"),
        ("{}\n", "r.py", "REWARD_IMPORT", "`r.py` has no function name"),
    ],
)
def test_a_test_that_can_not_run(samples: str | None, plugin: str, reason: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def f(samples): return [1.0]\n")
    if samples is not None:
        (tmp_path / "samples.jsonl").write_text(samples)
    with pytest.raises(RolloutError) as raised:
        check(plugin, base_dir=tmp_path)
    assert raised.value.reason == reason and message in raised.value.message and raised.value.fix
