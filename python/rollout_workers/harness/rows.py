"""What makes examples of rows, where a run trains on rows."""

from __future__ import annotations

from rollout.config.v1.run_config_pb2 import RunConfig
from rollout_workers.harness.preference import Labelled, Pairs
from rollout_workers.harness.prompts import PromptReader, Text
from rollout_workers.harness.supervised import Supervised


def rows_of(config: RunConfig, text: Text, prompts: PromptReader) -> Supervised | Pairs | Labelled | None:
    """What makes examples of rows, where the run trains on rows; None where it samples."""
    data, longest, kind = config.data, config.engine.max_model_len, config.algorithm.WhichOneof("kind")
    if kind == "sft":
        train_on_prompt = config.algorithm.sft.train_on_prompt
        return Supervised(text, prompts, answer_field=data.answer_field, train_on_prompt=train_on_prompt, max_tokens=longest)
    if kind in ("dpo", "ipo", "reward_model") or config.algorithm.kto.paired:
        return Pairs(
            text,
            prompts,
            chosen_field=data.chosen_field,
            rejected_field=data.rejected_field,
            margin_field=data.margin_field if kind == "reward_model" else "",
            margin=1.0 if kind == "kto" else 0.0,  # above 0: the desirable one
            max_tokens=longest,
        )
    if kind == "kto":
        return Labelled(text, prompts, completion_field=data.completion_field, label_field=data.label_field, max_tokens=longest)
    return None
