"""The example in Node, which is written from the protos alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rollout.hosting.manifest import read_manifest
from rollout.hosting.supervised import SupervisedSidecar
from rollout.plugin.v1 import plugin_pb2 as pb

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "plugins" / "node"
MISSING = [
    what
    for what, there in (
        ("node", shutil.which("node")),
        ("npm ci in examples/plugins/node", (EXAMPLE / "node_modules").exists()),
        ("make generate", (ROOT / ".tools" / "protovalidate").exists()),
    )
    if not there
]


@pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")
async def test_the_example_in_node_scores() -> None:
    sidecar = SupervisedSidecar(read_manifest("digits.toml:digits", EXAMPLE, kind="reward"))
    try:
        await sidecar.start()
        samples = [pb.RewardSample(prompt="1+1=", completion=text) for text in ("12", "a2", "")]
        groups = [pb.RewardGroup(row_json=json.dumps({"n": n}).encode(), samples=samples) for n in range(2)]
        scores = (await sidecar.call("Reward", pb.RewardRequest(plugin="digits", groups=groups), 60.0)).scores
    finally:
        await sidecar.close()
    assert [score.reward for score in scores] == [1.0, 0.5, 0.0] * 2
    assert [score.metrics["digits"] for score in scores] == [2.0, 1.0, 0.0] * 2
