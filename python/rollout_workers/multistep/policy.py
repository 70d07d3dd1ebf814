"""What the worker asks of a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypedDict, runtime_checkable

from torch import Tensor

from rollout_workers.multistep.errors import BatchInvalid, SettingsInvalid
from rollout_workers.weights.pretrained import load_whole


class Prediction(TypedDict, total=False):
    """What a policy returns with its actions. B rows, C actions of a chunk.

    prev_logprobs: float32 [B, C], of the actions at the time of sampling. prev_values: float32
    [B, 1] or [B, C]; the first column is the value of the observation. forward_inputs: what the
    learner needs to compute the logprobs of the actions again, each tensor [B, ...].
    """

    prev_logprobs: Tensor
    prev_values: Tensor
    forward_inputs: dict[str, Tensor]


@runtime_checkable
class Policy(Protocol):
    """A policy, such as a vision-language-action model. If it has an attribute ``value_head`` or
    ``q_head``, its values are used for bootstrapping."""

    def predict_action_batch(self, env_obs: Mapping[str, Any], mode: str) -> tuple[Any, Prediction]:
        """Choose the actions [B, C, ...] for a batch of observations, sampled if the mode is
        ``train``, the most likely ones if it is ``eval``. Called without gradients."""
        ...


def load_policy(path: str, *, device: str, trust_remote_code: bool) -> Policy:
    """Load a policy from a folder in the Hugging Face layout, in evaluation mode. The code of the
    folder runs only with ``trust_remote_code``; :class:`ActorCritic` needs none. Raises
    :class:`SettingsInvalid`, ``WeightsIncomplete``, ``ModelUnknown``."""
    from transformers import AutoModel

    import rollout_workers.multistep.actor_critic  # both register their model types
    import rollout_workers.multistep.token_actor  # noqa: F401

    model = load_whole(AutoModel, path, trust_remote_code=trust_remote_code)
    if not isinstance(model, Policy):
        raise SettingsInvalid(
            f"rollout.model.model_path: {type(model).__name__} of {path} has no method predict_action_batch",
            fix="add `predict_action_batch(env_obs, mode)` to the model's class",
        )
    model.to(device).eval()  # type: ignore[attr-defined]
    return model


def rows_of_actions(actions: Any) -> int:
    """The rows of chunk actions. Raises :class:`BatchInvalid`."""
    shape: Sequence[int] = getattr(actions, "shape", ())
    if not shape:
        raise BatchInvalid(f"chunk actions are a {type(actions).__name__}, not a tensor or an array with rows")
    return int(shape[0])
