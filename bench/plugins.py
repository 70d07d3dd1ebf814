"""Measures what each way to run a reward adds to a call.

    make bench-plugins; or PYTHONPATH=python python bench/plugins.py [--rounds 5] [--seconds 0.5]

The reward returns the length of prompt and completion, so that nearly all of the time is that of
the call: encoding, transport, and decoding. A sample has a completion of 200 characters with 64
tokens. Each line is the median round of the time per sample, for batches of 1, 64, and 1,024.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from rollout.hosting.child import ChildProcess
from rollout.hosting.manifest import read_manifest
from rollout.hosting.runner import InProcess, Runner
from rollout.hosting.supervised import SupervisedSidecar
from rollout.plugin.v1 import plugin_pb2 as pb
from rollout_testing.go import go_program

BATCHES = (1, 64, 1024)
REWARD = "def score(samples):\n    return [float(len(s.prompt) + len(s.completion)) for s in samples]\n"


def request(samples: int) -> pb.RewardRequest:
    """Samples in groups of eight."""
    made = pb.RewardRequest(plugin="score")
    sample = pb.RewardSample(prompt="12+30=", completion="x" * 200, token_ids=np.arange(64, dtype="<i4").tobytes())
    for start in range(0, samples, 8):
        made.groups.add(row_json=b'{"prompt": "12+30=", "answer": "42"}', samples=[sample] * min(8, samples - start))
    return made


async def per_sample(runner: Runner, samples: int, rounds: int, seconds: float) -> float:
    """Seconds per sample of the median round."""
    asked, found = request(samples), list[float]()
    for _ in range(rounds + 1):  # the first one warms up
        calls, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            answer = await runner.call("Reward", asked, 60.0)
            assert len(answer.scores) == samples and answer.scores[0].reward == 206.0
            calls += 1
        found.append((time.perf_counter() - began) / (calls * samples))
    return statistics.median(found[1:])


def manifest(folder: Path, name: str, command: list[str]) -> SupervisedSidecar:
    words = ", ".join(f'"{word}"' for word in command)
    (folder / f"{name}.toml").write_text(f'name = "score"\nversion = "1.0.0"\nkind = "reward"\ncommand = [{words}]\n')
    return SupervisedSidecar(read_manifest(f"{name}.toml:score", folder))


async def main(rounds: int, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "reward.py").write_text(REWARD)
        source = {"kind": "reward", "plugin": "reward.py:score", "base_dir": name}
        ways: dict[str, Runner] = {
            "in process": InProcess([source]),
            "child process": ChildProcess([source]),
            "sidecar, Python": manifest(folder, "python", ["python", "-m", "rollout.hosting.sidecar", "reward.py:score"]),
            "sidecar, Go": manifest(folder, "go", [str(go_program("plugintest"))]),
        }
        print(f"{'us per sample':<18}" + "".join(f"{f'batch {batch:,}':>14}" for batch in BATCHES))
        for way, runner in ways.items():
            await runner.start()
            found = [await per_sample(runner, batch, rounds, seconds) for batch in BATCHES]
            await runner.close()
            print(f"{way:<18}" + "".join(f"{value * 1e6:>14.1f}" for value in found), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure what each way to run a reward adds to a call.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a round")
    given = parser.parse_args()
    asyncio.run(main(given.rounds, given.seconds))
