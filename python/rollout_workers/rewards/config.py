"""Builds the scorer of a run from its config."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollout.config.v1.run_config_pb2 import RewardConfig, RewardLimitsConfig, RewardPartConfig, ScoringModelConfig
from rollout.hosting.boxed import BoxLimits
from rollout.hosting.manifest import is_manifest
from rollout.hosting.scorers import kind_of
from rollout_workers.rewards.composite import Composite, Part
from rollout_workers.rewards.pinned import Pinned
from rollout_workers.rewards.plugin import RewardPool, SidecarReward
from rollout_workers.rewards.rewards import Rewards, RewardSource, Scorer
from rollout_workers.worker.calls import Calls

Worker = Callable[[int], RewardSource]


def scorer_of(
    config: RewardConfig,
    base_dir: str,
    worker: Worker,
    pinned: Pinned | None = None,
    calls: Calls | None = None,
    *,
    evaluates: bool = False,
) -> Scorer:
    """base_dir: folder to which the paths of plugins are relative. worker: returns the source for
    the N-th reward model, ``reward-N``. pinned: the files of plugins in the plan of a run. calls:
    where open calls are recorded. evaluates: plugins may be evaluations, because it scores a
    suite."""
    if not config.composite:
        return Rewards(
            _source(config, config, base_dir, worker, 0, pinned, calls, evaluates),
            timeout_seconds=config.timeout_seconds,
            retries=config.retries,
            name=_name(config, 0),
            calls=calls,
        )
    parts: list[Part] = []
    served = 0
    for name in part_names(config):
        parts.append(_part(name, config, base_dir, worker, served, pinned, calls, evaluates))
        served += config.composite[name].HasField("model")
    return Composite(parts)


def models_of(config: RewardConfig) -> list[ScoringModelConfig]:
    """The reward models in the order of their workers."""
    if config.HasField("model"):
        return [config.model]
    return [config.composite[name].model for name in part_names(config) if config.composite[name].HasField("model")]


def part_names(config: RewardConfig) -> Sequence[str]:
    """The names of a composite reward's parts in the order of the sum."""
    return sorted(config.composite)


def _name(config: RewardConfig | RewardPartConfig, served: int) -> str:
    """The name of a reward, for people."""
    if config.HasField("model"):
        return f"reward-{served}"
    return "reward.expression" if config.HasField("expression") else config.plugin


def _part(
    name: str,
    config: RewardConfig,
    base_dir: str,
    worker: Worker,
    served: int,
    pinned: Pinned | None,
    calls: Calls | None,
    evaluates: bool,
) -> Part:
    part = config.composite[name]
    return Part(
        name,
        part.weight,
        Rewards(
            _source(config, part, base_dir, worker, served, pinned, calls, evaluates),
            timeout_seconds=part.timeout_seconds if part.HasField("timeout_seconds") else config.timeout_seconds,
            retries=part.retries if part.HasField("retries") else config.retries,
            name=_name(part, served),
            calls=calls,
        ),
    )


def _source(
    reward: RewardConfig,
    config: RewardConfig | RewardPartConfig,
    base_dir: str,
    worker: Worker,
    served: int,
    pinned: Pinned | None,
    calls: Calls | None,
    evaluates: bool,
) -> RewardSource:
    if config.HasField("model"):
        return worker(served)
    if config.HasField("expression"):
        return RewardPool({"expression": config.expression})
    if is_manifest(config.plugin):
        sidecar = SidecarReward(config.plugin, base_dir, pinned, evaluates=evaluates)
        if calls is not None:
            calls.supervise(config.plugin, lambda: sidecar.condition)
        return sidecar
    boxed = config.sandbox if config.HasField("sandbox") else reward.sandbox
    source = {"kind": kind_of(config.plugin, base_dir, evaluates=evaluates), "plugin": config.plugin, "base_dir": base_dir}
    return RewardPool(source, pinned, _limits(reward.limits) if boxed else None)


def _limits(limits: RewardLimitsConfig) -> BoxLimits:
    return BoxLimits(
        memory_bytes=limits.memory_bytes,
        pids=limits.pids,
        cpus=limits.cpus,
        output_bytes=limits.output_bytes,
        disk_bytes=limits.disk_bytes,
    )
