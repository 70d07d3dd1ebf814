"""Losses and advantage estimators under test, which run in this process, as they do in the
learner."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from rollout.plugin.loading import load_object
from rollout_plugins.testing.report import CheckFailed, SamplesInvalid
from rollout_workers.algorithms import LossTerms, TokenBatch

Json = dict[str, Any]
_OF_A_TOKEN = ("advantages", "old_logprobs", "engine_logprobs", "reference_logprobs")


class InLearner:
    """An advantage estimator or a loss."""

    starts = 1

    def __init__(self, kind: str, plugin: str, base_dir: str) -> None:
        self._kind, self._plugin, self._base_dir = kind, plugin, base_dir
        self._function: Any = None

    @property
    def pid(self) -> int:
        return os.getpid()

    async def start(self) -> str:
        torch.set_num_threads(1)
        self._function = load_object(self._plugin, self._base_dir, kind=self._kind)
        return f"{self._kind} `{self._plugin.rpartition(':')[2]}`, in this process"

    async def close(self) -> None:
        pass

    async def answers(self, items: Sequence[Json]) -> list[Json]:
        return [self._advantages(item) if self._kind == "advantage" else self._loss(item) for item in items]

    def unusual(self, item: Json) -> list[tuple[str, Json]]:
        if self._kind == "advantage":
            return [
                ("a group of one sample", {"rewards": [1.0], "groups": [0]}),
                ("equal rewards", {"rewards": [0.5] * 4, "groups": [0, 0, 1, 1]}),
                ("rewards of 1e12", {"rewards": [1e12, -1e12], "groups": [0, 0]}),
                ("groups in another order", {"rewards": [1.0, 2.0, 3.0], "groups": [1, 0, 1]}),
            ]
        return [
            ("one token", {"logprobs": [-1.0], "sample": [0], "advantages": [1.0]}),
            ("advantages of 0", item | {"advantages": [0.0] * len(item["logprobs"])}),
            ("a logprob of -100", item | {"logprobs": [-100.0] * len(item["logprobs"])}),
        ]

    def _advantages(self, item: Json) -> Json:
        rewards = torch.tensor(item["rewards"], dtype=torch.float64)
        groups = torch.tensor(item["groups"], dtype=torch.int64)
        found: Any = self._called(rewards.clone(), groups.clone())
        if not isinstance(found, torch.Tensor) or found.shape != rewards.shape or found.dtype != torch.float64:
            what = f"{found.dtype} {list(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
            raise CheckFailed(f"it returned {what} for {len(rewards)} rewards", fix=f"return float64 [{len(rewards)}]")
        if not bool(torch.isfinite(found).all()):
            raise CheckFailed(f"it returned {found.tolist()}", fix="return finite numbers, also for groups of one sample")
        return {"advantages": found.tolist()}

    def _loss(self, item: Json) -> Json:
        if "logprobs" not in item:
            raise SamplesInvalid(
                "a sample of a loss has no `logprobs`", fix='write `{"logprobs": [-1.0], "advantages": [1.0], "loss": 0.0}`'
            )
        logprobs = torch.tensor(item["logprobs"], dtype=torch.float32, requires_grad=True)
        given: dict[str, Any] = {name: torch.tensor(item[name], dtype=torch.float32) for name in _OF_A_TOKEN if name in item}
        sample = torch.tensor(item.get("sample", list(range(len(logprobs)))), dtype=torch.int64)
        batch = TokenBatch(
            logprobs, float(item.get("normalizer", len(logprobs))), float(len(set(sample.tolist()))), sample, **given
        )  # fmt: skip
        found: Any = self._called(batch)
        if not isinstance(found, LossTerms) or found.loss.shape != ():
            raise CheckFailed(
                f"it returned {type(found).__name__}, not LossTerms with a scalar", fix="return `LossTerms(loss, {...})`"
            )
        if not bool(torch.isfinite(found.loss)):
            raise CheckFailed(f"the loss is {found.loss.item()}", fix="return a finite number")
        if not found.loss.requires_grad:
            raise CheckFailed("the loss has no gradient", fix="compute it from `batch.logprobs`, which has one")
        found.loss.backward()
        gradient = logprobs.grad
        if gradient is None or not bool(torch.isfinite(gradient).all()):
            raise CheckFailed(f"the gradient is {gradient}", fix="make the gradient of `batch.logprobs` finite")
        if any(total.requires_grad for total in found.sums.values()):
            raise CheckFailed("a metric has a gradient", fix="detach the values of `sums`")
        return {
            "loss": found.loss.item(),
            "gradient": gradient.tolist(),
            "sums": {key: float(v) for key, v in found.sums.items()},
        }

    def _called(self, *given: Any) -> Any:
        try:
            return self._function(*given)
        except Exception as error:
            raise CheckFailed(f"it raises {type(error).__name__}: {error}", fix="correct the function") from error
