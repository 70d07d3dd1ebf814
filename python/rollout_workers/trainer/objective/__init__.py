"""What a step minimizes: one objective per family of algorithms, from samples to updates and
losses."""

from rollout_workers.trainer.objective.base import Models, Objective, Part
from rollout_workers.trainer.objective.preference import Preferences
from rollout_workers.trainer.objective.ranked import Ranked
from rollout_workers.trainer.objective.score import Scores
from rollout_workers.trainer.objective.token import Tokens
from rollout_workers.trainer.objective.unpaired import Unpaired

FAMILIES: dict[str, type[Objective]] = {
    "tokens": Tokens,
    "pairs": Preferences,
    "ranked": Ranked,
    "unpaired": Unpaired,
    "scores": Scores,
}

__all__ = ["FAMILIES", "Models", "Objective", "Part"]
