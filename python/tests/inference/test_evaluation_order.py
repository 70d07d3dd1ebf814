"""Evaluations return all held-out rows in order, in whatever order they are scored."""

import random

from rollout.inference.v1 import inference_pb2 as pb
from rollout_workers.inference.evaluation import take_chunk


def test_every_row_is_returned_once_and_in_order() -> None:
    rows = list(range(500))
    random.Random(3).shuffle(rows)
    scored: dict[int, pb.EvalSample] = {}
    sent: list[int] = []
    for row in rows:
        scored[row] = pb.EvalSample(row=row)
        while chunk := take_chunk(scored, len(sent), len(rows)):
            sent += [sample.row for sample in chunk]
    assert sent == list(range(500))
