"""The small job of the end-to-end tests with a real model, made longer."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mesh import ROOT, Mesh, assert_consumed_once

STEPS, GROUPS, SAMPLES = 30, 8, 4
_SET = (
    f"train.steps={STEPS}",
    "snapshot.every_steps=5",
    "eval.every_steps=0",
    "limits.worker_restarts=1000",
    "limits.worker_start_seconds=600",
)


@dataclass
class ModelJob:
    """Like `sim.Job`, with the untrained model of the addition example."""

    mode: str = "sync"
    folder: Path = ROOT / "e2e"

    def plan(self, running: Mesh) -> bytes:
        """The lock of the plan."""
        subprocess.run(
            [sys.executable, str(ROOT / "examples" / "addition" / "prepare.py")], check=True, stdout=subprocess.DEVNULL
        )
        mode = ("mode=async", "staleness.max_steps=2") if self.mode == "async" else ()
        return running.plan(self.folder / "job.toml", *_SET, *mode)

    def agree(self, running: Mesh, run: str) -> dict[str, int]:
        """Check that each prompt is consumed by the step of its window. In an asynchronous run the
        audit checks that each is consumed once."""
        if self.mode == "async":
            return {"steps": STEPS, "trained": STEPS * GROUPS * SAMPLES}
        assert_consumed_once(running, run, steps=STEPS, groups_per_step=GROUPS, group_size=SAMPLES)
        return {"steps": STEPS, "trained": STEPS * GROUPS * SAMPLES}
