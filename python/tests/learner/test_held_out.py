"""The learner's held-out rows, and the call that computes their loss."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import grpc
import pytest

from rollout.learner.v1 import learner_pb2 as pb
from rollout_testing.daemon import Daemon
from rollout_testing.run import Example, config, spec
from rollout_workers.learner.held_out import held_out_of

from .test_server import Learner


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


PAIRS = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "7"} for n in range(5)]
PREFERENCES = {"chosen_field": "chosen", "rejected_field": "rejected"}


def of(example: Example, algorithm: str, path: Path, *, every: int = 1, most: int = 0, reward: bool = False) -> Any:
    """The run config whose held-out rows are in ``path``."""
    made = config(
        example, algorithm, data={"eval": str(path), **PREFERENCES}, eval={"every_steps": str(every), "max_prompts": most}
    )
    if not reward:
        made.ClearField("reward")
    return made


def test_rows_of_pairs_keep_their_order_and_their_partner(daemon: Daemon, example: Example, tmp_path: Path) -> None:
    long = {"prompt": "1" * 80 + "=", "chosen": "1", "rejected": "2"}
    path = written(tmp_path / "eval.jsonl", [PAIRS[0], long, *PAIRS[1:]])
    held = held_out_of(spec(daemon, of(example, "reward_model", path, most=4)))
    assert held is not None and (held.rows, held.refused) == (4, 1)
    assert [(int(s.group_key), s.sample) for s in held.samples] == [(0, 0), (0, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    first = held.samples[0]
    assert (len(first.token_ids), first.prompt_length, first.loss_mask.tolist()) == (6, 4, [0, 0, 0, 0, 1, 1])


@pytest.mark.parametrize(("algorithm", "every", "reward"), [("sft", 0, False), ("sft", 1, True), ("grpo", 1, False)])
def test_runs_without_a_loss_on_held_out_rows(daemon: Daemon, example: Example, algorithm: str, every: int, reward: bool) -> None:
    asked = of(example, algorithm, example.data / "eval.jsonl", every=every, reward=reward)
    assert held_out_of(spec(daemon, asked)) is None


async def test_a_learner_computes_the_loss_of_its_current_step(
    daemon: Daemon, example: Example, run: str, tmp_path: Path
) -> None:
    learner = Learner(daemon, example, run, tmp_path, "sft")
    learner.made.spec.plan.config.CopyFrom(of(example, "sft", example.data / "eval.jsonl", most=40))
    await learner.start()
    request = pb.EvaluateLossRequest(run_id=run)
    try:
        await learner.initialize()
        first = await learner.call("EvaluateLoss", request)
        assert (first.rows, first.refused) == (40, 0)
        assert first.metrics["loss"] == pytest.approx(math.log(len("0123456789")), abs=2) and first.metrics["entropy"] > 0
        assert await learner.call("EvaluateLoss", request) == first
        assert await learner.refused(learner.call("EvaluateLoss", pb.EvaluateLossRequest(run_id=run, step=1))) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "STEP_OUT_OF_TURN",
        )
        assert (await learner.status()).activity == "waiting for a batch (learner-controller)"
        await learner.train(1)
        after = await learner.call("EvaluateLoss", pb.EvaluateLossRequest(run_id=run, step=1))
        assert after.metrics["loss"] != first.metrics["loss"]
    finally:
        assert await learner.made.stop() == 0


async def test_a_plan_without_held_out_rows_is_an_error(daemon: Daemon, example: Example, run: str, tmp_path: Path) -> None:
    learner = await Learner(daemon, example, run, tmp_path).start()
    try:
        await learner.initialize()
        refused = await learner.refused(learner.call("EvaluateLoss", pb.EvaluateLossRequest(run_id=run)))
        assert refused == (grpc.StatusCode.FAILED_PRECONDITION, "NO_EVALUATION")
    finally:
        assert await learner.made.stop() == 0
