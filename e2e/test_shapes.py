"""The same job in both shapes: one process with every target, and one process per service."""

import urllib.request
from pathlib import Path

import pytest
from mesh import mesh
from scenario import SLOW, six_steps


@pytest.mark.parametrize("shape", ["all", "seven"])
def test_six_steps_end_to_end(shape: str, config: Path, tmp_path: Path) -> None:
    with mesh(tmp_path, shape) as running:
        six_steps(running, config)


def test_gateway_answers_with_the_new_version(config: Path, tmp_path: Path) -> None:
    with mesh(tmp_path) as running:
        run = running.submit(config, SLOW, "train.steps=8")
        url = f"{running.daemon('rollout-gateway')['gateway']}/v1/completions"
        seen = []
        for step in (2, 6):
            running.until_step(run, step)
            body = b'{"model": "digits", "prompt": "1+1=", "max_tokens": 2}'
            request = urllib.request.Request(url, body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=30) as response:
                seen.append(int(response.headers["x-rollout-weights-version"]))
        assert seen[0] >= 1 and seen[1] >= 5 and seen[1] > seen[0]
        running.finish(run)
