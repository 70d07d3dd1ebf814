"""docs/metrics.md lists the OTLP metrics and spans that the sources declare."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_page_of_metrics_is_generated_from_the_sources() -> None:
    script = Path(__file__).parents[3] / "scripts" / "metrics.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
