"""What a step minimises: from samples to updates, and from a micro-batch to its part of the loss. One a family of algorithms."""

from rollout_workers.learner.objective.base import Machine, Objective, Part
from rollout_workers.learner.objective.preference import Preferences
from rollout_workers.learner.objective.ranked import Ranked
from rollout_workers.learner.objective.score import Scores
from rollout_workers.learner.objective.token import Tokens
from rollout_workers.learner.objective.unpaired import Unpaired

FAMILIES: dict[str, type[Objective]] = {
    "tokens": Tokens,
    "pairs": Preferences,
    "ranked": Ranked,
    "unpaired": Unpaired,
    "scores": Scores,
}

__all__ = ["FAMILIES", "Machine", "Objective", "Part"]
