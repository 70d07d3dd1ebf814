"""Rewards: what a plugin is given, what it may return, and how it is loaded and called.

A reward is a function in a file of the user's, named in the configuration as ``file.py:function``::

    def exact_match(samples):
        return [float(sample.completion == sample.row["answer"]) for sample in samples]

It takes a list of :class:`Sample` and returns one item for each, in order: a number, or a mapping
with the number ``reward`` and further named numbers (metrics). A mapping may also reward parts of a
completion, with or without ``reward``: with ``token_rewards``, one number for each of
``sample.token_ids``, or with ``step_rewards``, mappings of ``start``, ``end`` (characters of the
completion) and ``reward``, which counts at the last token of its step::

    return [{"reward": 1.0, "step_rewards": [{"start": 0, "end": 17, "reward": 0.5}]} for _ in samples]

A function may be ``async def``. A failure is never a reward of 0; each kind has its own exception:
:class:`RewardImportError`, :class:`RewardFailed`, :class:`RewardShapeError` and :class:`RewardTimeout`.

    >>> function = load_reward("reward.py:exact_match", base_dir="/home/me/run")
    >>> call_reward(function, [Sample("1+1=", "2", {"prompt": "1+1=", "answer": "2"})])
    [Score(reward=1.0, metrics={})]
"""

from rollout.plugin.calling import call_reward, call_reward_async
from rollout.plugin.loading import load_reward, split_plugin
from rollout.plugin.result import flaw
from rollout.plugin.score import (
    RewardError,
    RewardFailed,
    RewardFunction,
    RewardImportError,
    RewardShapeError,
    RewardTimeout,
    Sample,
    Score,
    Step,
)

__all__ = [
    "RewardError",
    "RewardFailed",
    "RewardFunction",
    "RewardImportError",
    "RewardShapeError",
    "RewardTimeout",
    "Sample",
    "Score",
    "Step",
    "call_reward",
    "call_reward_async",
    "flaw",
    "load_reward",
    "split_plugin",
]
