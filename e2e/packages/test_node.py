"""The example of a plugin in Node is installed from its lock and passes `rollout plugin test`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from rollout_plugins.testing import check

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "plugins" / "node"
UNREACHABLE = ("ENOTFOUND", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "EAI_AGAIN", "ENETUNREACH")


def test_the_example_in_node_passes() -> None:
    if missing := [program for program in ("node", "npm") if shutil.which(program) is None]:
        pytest.skip(f"the example in Node did not run: {', '.join(missing)} is not on PATH")
    done = subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=EXAMPLE, capture_output=True, text=True)
    if done.returncode and any(code in done.stderr for code in UNREACHABLE):
        pytest.skip(f"the example in Node did not run: the registry of npm can't be reached: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stdout + done.stderr
    report = check("digits.toml:digits", base_dir=EXAMPLE)
    assert report.passed and report.kind == "reward", str(report)
