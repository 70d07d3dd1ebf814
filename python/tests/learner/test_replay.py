"""A replay of recorded batches repeats the run's steps, including refused gradients."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format

from rollout.buffer.v1.buffer_pb2 import Batch
from rollout.config.v1.run_config_pb2 import RunConfig
from rollout.plan.v1.plan_pb2 import Plan
from rollout.trajectory.v1.trajectory_pb2 import Trajectory
from rollout_testing.run import Example, config
from rollout_workers.learner.payload import read_segments
from rollout_workers.learner.replay import EXIT_DATA, replay
from rollout_workers.learner.settings import trainer_config
from rollout_workers.trainer import Trainer
from rollout_workers.trainer.refusal import Refusals

from .batches import batch, trajectories

STEPS, REFUSED = 5, 4


def batches(folder: Path) -> list[Batch]:
    """The batch of each step. The batch of step ``REFUSED`` has NaN log-probabilities."""
    made = []
    for step in range(1, STEPS + 1):
        payloads = trajectories("run-replay", step, version=step - 1)
        if step == REFUSED:
            sample = Trajectory.FromString(payloads[0])
            sample.logprobs = np.full(len(sample.loss_mask), np.nan, "<f4").tobytes()
            payloads[0] = sample.SerializeToString(deterministic=True)
        made.append(batch("run-replay", step, payloads, folder))
    return made


def digests(settings: RunConfig, given: list[Batch], folder: Path) -> list[str]:
    """The digests of the model and of each step, from a run that saves its state after steps 2 and
    5."""
    refusals = Refusals(settings.train.on_refused_gradient)
    trainer = Trainer(settings.model.path, dataclasses.replace(trainer_config(settings, 1), refusals=refusals))
    found = [trainer.weights_digest().root]
    for made in given:
        trainer.train_step(read_segments(made), made.step)
        found.append(trainer.weights_digest().root)
        if made.step in (2, STEPS):
            trainer.save_state(folder)
    return found


@pytest.mark.parametrize("action", ["skip", "restore", "stop"])
def test_a_refused_gradient_is_handled_as_in_the_run(
    example: Example, tmp_path: Path, action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train = {"on_refused_gradient": action, "steps": STEPS}
    settings = config(example, mode="async", train=train, snapshot={"every_steps": 2})
    given = batches(tmp_path)
    made = digests(settings, given, tmp_path / "state") if action != "stop" else ["", *[""] * STEPS]
    if action == "stop":
        made[0] = Trainer(settings.model.path, trainer_config(settings, 1)).weights_digest().root
        given = given[REFUSED - 1 :]
        given[0].step = 1
    head: dict[str, Any] = {"plan": json_format.MessageToDict(Plan(config=settings), preserving_proto_field_name=True)}
    head |= {"base_dir": "", "threads": 1, "state_directory": "", "step": 0, "digest": made[0]}
    lines = [{"batch": json_format.MessageToDict(b), "digest": digest} for b, digest in zip(given, made[1:], strict=False)]
    spec = tmp_path / "spec.jsonl"
    spec.write_text("".join(json.dumps(line) + "\n" for line in (head, *lines)))
    capsys.readouterr()
    assert replay(str(spec)) == (EXIT_DATA if action == "stop" else 0)
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["replayed"] for line in printed] == (made if action != "stop" else made[:1])
    if action != "stop":
        assert made[REFUSED] == made[2 if action == "restore" else REFUSED - 1] != made[STEPS]
