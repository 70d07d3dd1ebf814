"""scripts/demo runs in its own state folder and stops only a daemon that it started."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

_DEMO = Path(__file__).parents[3] / "scripts" / "demo"
_ROLLOUT = """#!/bin/sh
echo "$* in $ROLLOUT_STATE_DIR $ROLLOUT_SERVER" >>{calls}
[ "$1 $2" != "daemon status" ] || exit {status}
"""


def _demo(root: Path, model: str, *, running: bool) -> tuple[int, list[str]]:
    """The exit code, and the calls of `rollout`, of the demo in a checkout with stand-ins for its
    programs."""
    calls = root / "calls"
    calls.touch()
    for name, text in {
        "bin/rollout": _ROLLOUT.format(calls=calls, status=0 if running else 69),
        ".venv/bin/python": "#!/bin/sh\n",
    }.items():
        program = root / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
    (root / "scripts").mkdir()
    shutil.copy(_DEMO, root / "scripts" / "demo")
    environment = {**os.environ, "ROLLOUT_STATE_DIR": "/mine", "ROLLOUT_SERVER": "elsewhere:1"}
    done = subprocess.run([root / "scripts" / "demo", model], env=environment, check=False, capture_output=True)
    return done.returncode, calls.read_text().splitlines()


@pytest.mark.parametrize("running", [False, True])
def test_the_demo_stops_only_a_daemon_that_it_started(tmp_path: Path, running: bool) -> None:
    code, calls = _demo(tmp_path, "smollm2", running=running)
    assert code == 0
    assert all(call.endswith(f"in {tmp_path}/demo-out/state ") for call in calls), calls
    assert any(call.startswith("run --config") for call in calls)
    assert any(call.startswith("daemon stop") for call in calls) is not running


def test_an_unknown_model_touches_no_daemon(tmp_path: Path) -> None:
    assert _demo(tmp_path, "nope", running=False) == (64, [])
