"""The sampling parameters of runs and requests. Fields that a request does not set have the values
of the run."""

from __future__ import annotations

from rollout.config.v1.run_config_pb2 import SamplingConfig
from rollout.inference.v1 import inference_pb2 as pb
from rollout_workers.engines.base import SamplingParams


def of_run(sampling: SamplingConfig) -> SamplingParams:
    """The sampling parameters for the groups of a run."""
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=tuple(sampling.stop),
    )


def of_request(given: pb.SamplingParams, run: SamplingParams, room: int) -> SamplingParams:
    """The sampling parameters of a request. room: number of tokens left in the context, the default
    of ``max_tokens``."""
    return SamplingParams(
        max_tokens=given.max_tokens if given.HasField("max_tokens") else max(1, min(run.max_tokens, room)),
        temperature=given.temperature if given.HasField("temperature") else run.temperature,
        top_p=given.top_p if given.HasField("top_p") else run.top_p,
        top_k=given.top_k if given.HasField("top_k") else run.top_k,
        min_p=given.min_p if given.HasField("min_p") else run.min_p,
        stop=tuple(given.stop) or run.stop,
    )
