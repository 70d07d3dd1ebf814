"""Trains the recorded batches of a run again, from files alone. It needs no services.

The spec is a file with one JSON object per line: first the plan and the initial state, then the
steps in order::

    {"plan": Plan, "base_dir": "/jobs/sums", "threads": 2, "state_directory": "", "step": 0, "digest": "blake3-.."}
    {"batch": Batch, "digest": "blake3-.."}

``batch.samples`` name the files with the payloads. Standard output gets one line per step when the
step is made; the first line is for the initial state::

    {"step": 1, "recorded": "blake3-..", "replayed": "blake3-..", "samples": 24}

A step without a recorded digest, which a run does not compute for weights that are not published,
has an empty one. The exit code is 0 if every digest equals the recorded one. It is 65 if a digest
differs (later steps are not trained then), if a payload is damaged, or if the learner refuses a
batch. With ``on_refused_gradient`` ``restore`` a refusal restores the last of the snapshots that
the plan schedules; a snapshot that was taken when the run was stopped is not known here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from google.protobuf import json_format

from rollout.buffer.v1.buffer_pb2 import Batch
from rollout.errors import RolloutError
from rollout.plan.v1.plan_pb2 import Plan
from rollout.run.v1.run_pb2 import WorkerSpec
from rollout_workers.learner.payload import PayloadCorrupt, read_segments
from rollout_workers.learner.ranks import Team
from rollout_workers.learner.settings import lasting, trainer_config
from rollout_workers.trainer import LearnerError, Trainer
from rollout_workers.trainer.refusal import Refusals
from rollout_workers.worker.spec import model_directory

log = logging.getLogger(__name__)

EXIT_DATA = 65
EXIT_NO_INPUT = 66


class ReplaySpecError(RolloutError):
    """The spec is missing or invalid."""

    reason: ClassVar[str] = "REPLAY_SPEC_INVALID"


def replay(path: str) -> int:
    """Train the steps that the spec at ``path`` lists. Returns the exit code."""
    team: Team | None = None
    try:
        lines = _lines(path)
        head = next(lines)
        plan = json_format.ParseDict(head["plan"], Plan(), ignore_unknown_fields=True)
        team = Team(plan.config, lambda _: None)
        trainer = _trainer(head, plan, team)
        if not _compare(trainer, trainer.step, head["digest"], 0):
            return EXIT_DATA
        for line in lines:
            batch = json_format.ParseDict(line["batch"], Batch())
            samples = read_segments(batch)
            trainer.train_step(samples, batch.step)
            if not _compare(trainer, batch.step, line["digest"], len(samples)):
                return EXIT_DATA
            if trainer.config.refusals.action == "restore" and lasting(plan.config, batch.step):
                trainer.restore_point()  # the run saved its state at this step
    except ReplaySpecError as error:
        log.error("%s", error)
        return EXIT_NO_INPUT
    except (PayloadCorrupt, LearnerError, OSError, ValueError) as error:
        log.error("%s", error)
        return EXIT_DATA
    finally:
        if team is not None:
            team.close()
    return 0


def _trainer(head: dict[str, Any], plan: Plan, team: Team) -> Trainer:
    """The trainer with as many ranks and the same handling of refused gradients as in the run,
    because both affect the bits."""
    spec = WorkerSpec(plan=plan, base_dir=head["base_dir"])
    settings = replace(
        trainer_config(plan.config, int(head["threads"]), spec.base_dir),
        refusals=Refusals(plan.config.train.on_refused_gradient or "stop"),  # the run has saved the batch
    )
    trainer = team.trainer(model_directory(spec), settings)
    if head["state_directory"]:
        trainer.load_state(head["state_directory"])
    if trainer.step != int(head["step"]):
        raise ValueError(f"the state has step {trainer.step}, but the spec requires {head['step']}")
    return trainer


def _compare(trainer: Trainer, step: int, recorded: str, samples: int) -> bool:
    made = trainer.weights_digest().root
    print(json.dumps({"step": step, "recorded": recorded, "replayed": made, "samples": samples}), flush=True)
    return recorded in ("", made)


def _lines(path: str) -> Iterator[dict[str, Any]]:
    try:
        with Path(path).open() as file:
            empty = True
            for line in file:
                yield json.loads(line)
                empty = False
    except (OSError, ValueError) as error:
        raise ReplaySpecError(f"can't read {path or 'the spec'}: {error}") from error
    if empty:
        raise ReplaySpecError(f"{path} has no lines")
