"""The outcomes of episodes by the names of ``rollout.environment.Outcome``."""

from __future__ import annotations

from collections.abc import Mapping

from rollout.trajectory.v1 import trajectory_pb2 as pb

OUTCOMES: Mapping[str, pb.Outcome.ValueType] = {
    "completed": pb.OUTCOME_COMPLETED,
    "truncated": pb.OUTCOME_TRUNCATED,
    "aborted": pb.OUTCOME_ABORTED,
    "infra_failed": pb.OUTCOME_INFRA_FAILED,
}
