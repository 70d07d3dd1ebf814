"""Processes of plugins end with the worker, also while they hold the interpreter."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")

_REWARD = """
import re

def holds(samples):
    re.match(r"(a+)+$", "a" * 60 + "!")
"""
_WORKER = """
import asyncio, sys
from pathlib import Path
from rollout.hosting.child import ChildProcess
from rollout.hosting.manifest import read_manifest
from rollout.hosting.supervised import SupervisedSidecar
from rollout.plugin.v1 import plugin_pb2 as pb

async def main(way, folder):
    if way == "child":
        plugin = ChildProcess([{"kind": "reward", "plugin": "reward.py:holds", "base_dir": folder}])
    else:
        plugin = SupervisedSidecar(read_manifest("plugin.toml:holds", Path(folder)))
    await plugin.start()
    group = pb.RewardGroup(row_json=b"{}", samples=[pb.RewardSample(prompt="", completion="")])
    call = asyncio.create_task(plugin.call("Reward", pb.RewardRequest(groups=[group]), 600))
    await asyncio.sleep(1)
    print(plugin.pid, flush=True)
    await call

asyncio.run(main(*sys.argv[1:]))
"""


def _cpu_seconds(pid: str) -> float | None:
    """The processor time of a process; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else (int(fields[11]) + int(fields[12])) / 100


@pytest.mark.parametrize("way", ["child", "sidecar"])
def test_a_process_that_holds_the_interpreter_ends_with_its_worker(way: str, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(_REWARD)
    (tmp_path / "plugin.toml").write_text(
        'name = "holds"\nversion = "1.0.0"\nkind = "reward"\n'
        'command = ["python", "-m", "rollout.hosting.sidecar", "reward.py:holds"]\n'
    )
    worker = subprocess.Popen([sys.executable, "-c", _WORKER, way, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    with worker:
        pid = worker.stdout.readline().strip()
        start = _cpu_seconds(pid)
        assert start is not None
        until = time.monotonic() + 20
        while (now := _cpu_seconds(pid)) is None or now < start + 0.2:
            assert now is not None and time.monotonic() < until, "the plugin does not compute"
            time.sleep(0.05)
        worker.send_signal(signal.SIGKILL)
    until = time.monotonic() + 20
    while _cpu_seconds(pid) is not None:
        assert time.monotonic() < until, "the process of the plugin outlives its worker"
        time.sleep(0.05)
