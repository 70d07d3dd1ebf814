"""Runs the suites of the engine and the learner on a device that is not the CPU, like on a GPU, in
a separate process.

Excluded are tests that compare bits of the CPU's kernels, and tests in which code of Hugging Face
creates tensors in a way that only a real device supports. Every operation costs ten times what it
does on the CPU, so ``make test`` runs what covers each operation once; with ``FAR_DEVICE=all``, as
in ``make check-full``, the suites are whole.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TESTS = HERE.parent
EXCLUDED = [
    "bits_of_samples",
    "same_bits",
    "equal_bits",
    "keep_their_bits",
    "bits_do_not_depend",
    "disconnected_caller",  # needs a deterministic engine, like the tests above
    "gpt2",
    "decodes_differently",
]
SLOW = [
    *("micro_batches", "bit_for_bit", "it_learns", "non_finite_gradient", "off_policy", "ipo", "divergence", "classifier"),
    *("in_flight", "qwen2", "mistral", "abort", "own_end_token"),
]
SUITES = {
    "engine": ["engines/test_control.py", "engines/test_generate.py", "engines/test_score.py", "engines/test_current_weights.py"],
    "learner": ["trainer/test_families.py", "trainer/test_trainer.py", "learner/test_learner.py", "inference/test_merging.py"],
    "reward model": ["scoring"],
}


def pytest_of(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(TESTS.parent)])}
    command = [sys.executable, "-m", "pytest", "-p", "far_device", "-p", "no:cacheprovider", "--assert=plain", *arguments]
    return subprocess.run(command, env=env, cwd=TESTS.parent, capture_output=True, text=True, check=False)


@pytest.mark.timeout(600)  # whole suites
@pytest.mark.parametrize("suite", SUITES)
def test_suite_passes_on_the_device(suite: str) -> None:
    excluded = EXCLUDED if os.environ.get("FAR_DEVICE") == "all" else EXCLUDED + SLOW
    done = pytest_of("-k", "not " + " and not ".join(excluded), *(str(TESTS / name) for name in SUITES[suite]))
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]


def test_operations_that_fail_on_a_gpu_fail(tmp_path: Path) -> None:
    """The simulated device is strict: code that fails on a GPU fails here too."""
    wrong = tmp_path / "test_wrong.py"
    wrong.write_text(
        "import pytest, torch\n"
        "there = torch.zeros(3).to('lazy:0')\n"
        "@pytest.mark.parametrize('call', [lambda: there + torch.ones(3), lambda: there.numpy(), lambda: there.data_ptr()])\n"
        "def test(call):\n    call()\n"
        "def test_right():\n    assert (there + there.new_ones(3)).cpu().numpy().sum() == 3 and there.device.type == 'lazy'\n"
    )
    done = pytest_of(str(wrong))
    assert "3 failed, 1 passed" in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]
