"""The output of ``rollout-worker episodes``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import os, sys
from rollout_workers.offline import episodes

async def answer(request):
    print("of the environment")
    os.system("echo of its process")
    return {"steps": []}

episodes._answer = answer
episodes.episodes(sys.argv[1])
"""


def test_what_an_environment_prints_is_not_in_the_answer(tmp_path: Path) -> None:
    request = tmp_path / "request.json"
    request.write_text("{}")
    done = subprocess.run([sys.executable, "-c", _PROGRAM, str(request)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"steps": []}
    assert "of the environment" in done.stderr and "of its process" in done.stderr
