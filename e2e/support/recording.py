"""Compares trajectories with what the engines returned (`rollout_testing.sim.recorded`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from mesh import ROOT, Mesh, pages

from rollout.buffer.v1 import buffer_pb2
from rollout.trajectory.v1.trajectory_pb2 import Trajectory
from rollout_testing.sim import journal

Calls = Mapping[tuple[tuple[int, ...], tuple[int, ...]], list[dict[str, Any]]]
"""What engines recorded, by the tokens before each sample and the sampled ones."""


def recorded_mesh(state: Path, shape: str = "all") -> Mesh:
    """Services whose inference workers record what their engines return."""
    worker = ("--worker-command", f"{sys.executable} -m rollout_testing.sim.recorded", "--worker-python", sys.executable)
    return Mesh(state, shape, arguments=worker, environment={"PYTHONPATH": str(ROOT / "python")})


def calls_of(running: Mesh, run: str) -> Calls:
    """Everything that the engines of a run returned."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[dict[str, Any]]] = {}
    for call in journal.read(running.status(run).run.directory, "inference", running.environment):
        found.setdefault((tuple(call["prompt"]), tuple(call["tokens"])), []).append(call)
    return found


def trained(running: Mesh, run: str) -> Iterator[Trajectory]:
    """The trajectories of all steps, as the buffer stores them."""
    steps = [s for page in pages(running.buffer.ListSteps, buffer_pb2.ListStepsRequest(run_id=run)) for s in page.steps]
    for step in steps:
        for part in running.buffer.ReadPayloads(buffer_pb2.ReadPayloadsRequest(run_id=run, step=step.step)):
            for payload in part.payloads:
                yield Trajectory.FromString(payload)


def ids_agree(running: Mesh, run: str) -> tuple[int, int]:
    """Check that every trajectory of a run consists of what the engines returned: each sampled part
    has the ids, the logprobs, and the weights of one call, and the tokens before it were the prompt
    of that call. Returns the numbers of trajectories and of sampled parts."""
    calls, trajectories, parts = calls_of(running, run), 0, 0
    for trajectory in trained(running, run):
        trajectories += 1
        ids = np.frombuffer(trajectory.token_ids, np.int32)
        logprobs = np.frombuffer(trajectory.logprobs, np.float32)
        name = f"{trajectory.key.epoch}/{trajectory.key.index}/{trajectory.key.attempt}, sample {trajectory.key.sample}"
        sampled = _parts(np.frombuffer(trajectory.loss_mask, np.uint8))
        assert sampled, f"{name}: no sampled token"
        for start, end in sampled:
            parts += 1
            found = calls.get((tuple(ids[:start].tolist()), tuple(ids[start:end].tolist())), [])
            assert found, f"{name}: no engine returned the tokens {start} to {end} after those before them"
            versions = {
                s.version: s.digest for s in trajectory.version_spans if s.start < end - trajectory.prompt_tokens <= s.end
            }
            equal = [
                call
                for call in found
                if np.array_equal(np.float32(call["logprobs"]), logprobs[start:end])
                and versions == {call["version"]: call["digest"]}
            ]
            assert equal, f"{name}: tokens {start} to {end} have other logprobs or versions: {found[0]}, {versions}"
    return trajectories, parts


def _parts(mask: np.ndarray) -> list[tuple[int, int]]:
    """First token and one past the last of each sampled part."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
