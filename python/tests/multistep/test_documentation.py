"""The examples of docs/multistep.md run, and its table has every key that the worker reads."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_testing.daemon import Daemon
from rollout_workers.multistep import settings

PAGE = (Path(__file__).parents[3] / "docs" / "multistep.md").read_text()


def test_the_first_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    program = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert program is not None
    exec(compile(program[1], "docs/multistep.md", "exec"), {"__name__": "example"})
    printed = capsys.readouterr().out
    assert "1 torch.Size([4, 2])" in printed
    assert (tmp_path / "policy" / "model.safetensors").exists()


def test_the_example_of_channels_runs(tmp_path: Path, daemon: Daemon) -> None:
    section = PAGE[PAGE.index("## Channels") :]
    program = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert program is not None
    (tmp_path / "exchange.py").write_text(program[1])
    command = [sys.executable, str(tmp_path / "exchange.py")]
    with (
        subprocess.Popen([*command, "receive", daemon.nats_url, daemon.token], stdout=subprocess.PIPE) as receiver,
        subprocess.Popen([*command, "send", daemon.nats_url, daemon.token]) as sender,
    ):
        try:
            printed = receiver.communicate(timeout=60)[0].decode()
            assert sender.wait(60) == receiver.returncode == 0
        finally:
            receiver.kill()
            sender.kill()
    assert printed.startswith("{'obs': {'states': tensor([[0., 0., 0., 0.]"), printed


def test_every_key_is_documented() -> None:
    source = Path(settings.__file__).read_text().replace("{mode}", "train")
    keys = set(re.findall(r'"((?:rollout|env|actor|algorithm)\.[a-z_.]+)"', source))
    assert len(keys) > 12
    table = PAGE[PAGE.index("## Keys of the config") :]
    assert sorted(key for key in keys if f"`{key}`" not in table) == []
