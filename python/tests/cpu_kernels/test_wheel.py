"""The wheel contains the compiled kernels if there is a C compiler, and works without them
otherwise."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PYTHON = Path(__file__).resolve().parents[2]
CODEC = "from rollout_workers.kernels.segments import segment_codec; print(type(segment_codec()).__name__)"


@pytest.mark.parametrize(
    ("compiler", "kernels", "codec"),
    [(None, {"_layers", "_segments"}, "CompiledSegments"), ("/nonexistent", set(), "NumpySegments")],
)
def test_wheel(tmp_path: Path, compiler: str | None, kernels: set[str], codec: str) -> None:
    source = tmp_path / "source"
    shutil.copytree(PYTHON, source, ignore=shutil.ignore_patterns("tests", "_*.so", "__pycache__"))
    environment = os.environ | ({"CC": compiler} if compiler else {})
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    built = subprocess.run(build, cwd=source / "workers", env=environment, capture_output=True, text=True, check=True)
    assert ("CPU kernels not compiled" in built.stdout + built.stderr) == (not kernels)

    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl") == (not kernels)
    shutil.unpack_archive(wheel, tmp_path / "wheel", "zip")
    libraries = (tmp_path / "wheel" / "rollout_workers" / "kernels").glob("*.so")
    assert {path.name.rpartition("-")[0] for path in libraries} == kernels
    used = subprocess.run(
        [sys.executable, "-c", CODEC], cwd=tmp_path / "wheel", env=environment, capture_output=True, text=True, check=True
    )
    assert used.stdout.strip() == codec
    assert ("run scripts/kernel" in used.stderr) == (not kernels)
