"""Tests of a plugin alone: without a GPU, network, or services, in less than a minute.

``check`` is for tests; ``rollout plugin test`` prints the same report::

    def test_word_count() -> None:
        report = check("word_count.py:word_count", base_dir=Path(__file__).parent)
        assert report.passed, str(report)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rollout.hosting.wire import with_reason
from rollout_plugins.testing.report import CheckFailed, Report, SamplesInvalid, Verdict

__all__ = ["CheckFailed", "Report", "SamplesInvalid", "Verdict", "check"]


def check(
    plugin: str, *, base_dir: str | os.PathLike[str] = ".", kind: str = "", samples: str = "", timeout: float = 10.0
) -> Report:
    """Run the checks of ``file.py:NAME``, ``plugin.toml:NAME``, or ``DISTRIBUTION:NAME`` in a
    separate process.

    kind: of the plugin; by default that of its manifest or entry point, or the one that its samples
    fit. samples: file of golden samples; by default ``NAME.samples.jsonl`` or ``samples.jsonl``
    next to the plugin. timeout: seconds of a call. Raises ``RolloutError`` if the plugin or its
    samples can't be read.
    """
    request = {"test": plugin, "base_dir": os.path.abspath(base_dir), "kind": kind, "samples": samples, "timeout": timeout}
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder, "request.json")
        spec.write_text(json.dumps(request))
        done = subprocess.run(
            [sys.executable, "-m", "rollout_plugins", "plugin", "--spec", str(spec)], stdout=subprocess.PIPE, check=False
        )
    answer = json.loads(done.stdout or b'{"error": {"reason": "PLUGIN_CHECK", "message": "the process ended", "fix": ""}}')
    if error := answer.get("error"):
        raise with_reason(CheckFailed(error["message"], fix=error["fix"]), error["reason"])
    return Report.of(answer["report"])
