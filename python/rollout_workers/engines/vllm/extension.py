"""Methods that `vllm serve` adds to its workers, by `--worker-extension-cls`: verified weights and
the seeds of tokens, as in ``core.py``.

The module is imported before the worker builds its model, whose linear weights then stay readable.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from rollout_workers.engines.errors import EngineError
from rollout_workers.engines.vllm.seeds import token_seed
from rollout_workers.engines.vllm.weights import LoadedWeights, keep_linear_weights
from rollout_workers.weights import read_weights
from rollout_workers.weights.store import WeightsUnreadable

keep_linear_weights()

SEED, SAMPLED_BEFORE = "rollout_seed", "rollout_sampled_before"
"""Keys of ``extra_args`` of a request: the seed of its sample, and the number of tokens that an
earlier request sampled."""


class Worker:
    """A part of vLLM's worker. Methods are called between two steps (``/collective_rpc``), and
    return a dict, which has ``error`` if they failed."""

    def rollout_load(self, folder: str) -> dict[str, str]:
        """Load all tensors of a folder, and keep where each went."""
        model = self.model_runner.model  # type: ignore[attr-defined]
        try:
            tensors = read_weights(folder)
            loaded: LoadedWeights | None = getattr(self, "_rollout_weights", None)
            if loaded is None:
                self._rollout_weights = LoadedWeights(model, model.load_weights, tensors, verify="none")
                _seed_tokens(self.model_runner)  # type: ignore[attr-defined]
            else:
                loaded.replace(tensors)
        except (EngineError, WeightsUnreadable, OSError, KeyError, ValueError, RuntimeError, AssertionError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {}

    def rollout_digest(self) -> dict[str, str]:
        """The root of the digest over the model's tensors."""
        loaded: LoadedWeights | None = getattr(self, "_rollout_weights", None)
        if loaded is None:
            return {"error": "no weights were loaded"}
        try:
            return {"digest": loaded.digest().root}
        except EngineError as error:
            return {"error": str(error)}


def _seed_tokens(runner: Any) -> None:
    """Set the generator of each request from its seed and the index of the token, before each
    step."""
    execute = runner.execute_model

    def seeded(*args: Any, **kwargs: Any) -> Any:
        for state in runner.requests.values():
            extra = getattr(state.sampling_params, "extra_args", None) or {}
            if SEED in extra and state.generator is not None:
                state.generator.manual_seed(token_seed(extra[SEED], extra[SAMPLED_BEFORE] + len(state.output_token_ids)))
        return execute(*args, **kwargs)

    runner.execute_model = seeded
