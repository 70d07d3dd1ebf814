"""The trainer: makes one step per batch."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout_workers.algorithms import Algorithm, build_algorithm
from rollout_workers.devices import repeat_bits
from rollout_workers.trainer.distributed.ranks import ALONE, Ranks
from rollout_workers.trainer.distributed.shards import whole
from rollout_workers.trainer.metrics import PhaseTimer, TokenSums, UpdateMeans, describe_batch, sampled_entropy
from rollout_workers.trainer.model.adapter import LoraConfig
from rollout_workers.trainer.model.critic import Critic
from rollout_workers.trainer.model.policy import Policy
from rollout_workers.trainer.model.reference import Reference, ReferenceCache
from rollout_workers.trainer.model.scorer import Scorer
from rollout_workers.trainer.model.teacher import Teacher
from rollout_workers.trainer.objective import FAMILIES, Models, Objective
from rollout_workers.trainer.optim.moments import AdamWConfig
from rollout_workers.trainer.optim.optimizer import FlatAdamW, OptimizerSet
from rollout_workers.trainer.optim.schedule import Schedule
from rollout_workers.trainer.packing import MicroBatch
from rollout_workers.trainer.refusal import Refusals
from rollout_workers.trainer.state import Saving, load_state, save_state
from rollout_workers.trainer.types import (
    BadBatch,
    ExplodingGradient,
    NonFiniteGradient,
    StepOutOfTurn,
    StepResult,
    TrainSample,
)
from rollout_workers.weights import WeightsDigest, WeightsManifest, streamed_digest, weights_digest, write_adapter, write_weights


@dataclass(frozen=True, slots=True)
class ActingConfig:
    """Settings of a policy that acts for many steps, under the names of ``[multistep]``."""

    reward_type: str = "chunk_level"
    trust_remote_code: bool = False
    logprob_type: str = ""
    """"": as ``reward_type``."""


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """Settings of a trainer, under the names of the run config."""

    algorithm: str = "grpo"
    settings: Any = None
    """The algorithm's config dataclass, such as ``GrpoConfig``. None: the algorithm's defaults."""
    schedule: Schedule = field(default_factory=lambda: Schedule(peak=1e-6))
    optimizer: AdamWConfig = field(default_factory=AdamWConfig)
    temperature: float = 1.0
    """The sampling temperature of the completions. 0 (greedy) counts as 1."""
    tokens_per_microbatch: int = 16_384
    """The maximum number of positions of one forward and backward pass, padding included. Changes
    the gradient by rounding only."""
    threads: int = 0
    """CPU threads of a step; 0: all cores. Bits are reproducible for one number of threads."""
    dtype: torch.dtype = torch.float32
    seed: int = 0
    lora: LoraConfig | None = None
    """Train adapters only. The reference model is then the model without adapters."""
    freeze: tuple[str, ...] = ()
    """Patterns over the names of tensors that are not trained."""
    gradient_checkpointing: bool = False
    deterministic: bool = True
    """Select deterministic GPU kernels, which are slower. The CPU's are deterministic."""
    refuse_grad_norm: float = 0.0
    """Refuse a gradient whose norm exceeds this, like one that is not finite; 0: no limit."""
    refusals: Refusals = field(default_factory=Refusals)
    """What happens when a gradient is refused."""
    acting: ActingConfig | None = None
    """Of a policy that acts for many steps; None: a language model is trained."""


class Trainer:
    """A model in training.

    Deterministic on the CPU, and with ``config.deterministic`` on GPUs: the same model, config, and
    batches give the same bits on the same number of threads and ranks, in whatever order a batch
    lists its samples. Not thread-safe. ``train_step``
    blocks: with an event loop, call it from another thread. A step that raises leaves weights,
    optimizer, and step unchanged.

    With several ranks each process has one trainer, and every call must be made on all of them with
    the same arguments (see ``leader``). A ``LearnerError`` is raised on all ranks;
    after any other exception on some of them the ranks must be restarted.
    """

    def __init__(self, model_dir: str | os.PathLike[str], config: TrainerConfig, ranks: Ranks = ALONE) -> None:
        """Load a model from a folder in the Hugging Face layout, at step 0. Raises ``OSError`` if
        it cannot be loaded."""
        self.ranks = ranks
        self.model_dir = Path(model_dir)
        self.config = config
        self.algorithm: Algorithm = build_algorithm(config.algorithm, config.settings)
        self.step = 0
        self._use_threads()
        if config.deterministic:
            repeat_bits()
        torch.manual_seed(config.seed)
        kind = Scorer if self.algorithm.needs.score_head else Policy
        self.policy: Policy = kind.prepare(
            model_dir,
            dtype=config.dtype,
            lora=config.lora,
            frozen=config.freeze,
            checkpointing=config.gradient_checkpointing,
            seed=config.seed,
            ranks=ranks,
        )
        self.policy.shard(ranks)
        self.models = Models(
            self.policy,
            self.algorithm,
            temperature=(config.temperature or 1.0) if self.algorithm.needs.sampled else 1.0,
            tokens=config.tokens_per_microbatch,
            seed=config.seed,
            reference=Reference(self.policy, model_dir, ranks) if self.algorithm.needs.reference else None,
            critic=_critic(self.policy, self.algorithm, config, model_dir, ranks),
            teacher=_teacher(self.policy, self.algorithm, config, ranks),
            kl_coefficient=self.algorithm.initial_kl_coefficient,
            ranks=ranks,
        )
        self._held_out = ReferenceCache()  # of evaluations; the state holds only the cache of trained samples
        critic = self.models.critic
        for model in (self.models.reference, critic, self.models.teacher):
            if model is not None:
                model.shard(ranks)
        self.optimizer = FlatAdamW(self.policy.model, config.optimizer, extra=critic if critic and critic.on_policy else None)
        self.critic_optimizer = (
            FlatAdamW(critic, replace(config.optimizer, ema_decay=0.0)) if critic and not critic.on_policy else None
        )
        self.optimizers = OptimizerSet(self.optimizer, self.critic_optimizer)
        self.config_folder = self.policy.config_folder(self.model_dir)
        self._restore_point: tuple[list[list[Tensor]], float] | None = None
        self._saving: Saving | None = None
        self.mark()

    def train_step(
        self,
        samples: Sequence[TrainSample],
        step: int,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> StepResult:
        """Make step ``step``, which must be ``self.step + 1``, from a batch in any order.

        The algorithm decides how many weight updates a step makes. ``on_progress`` is called with
        the number of micro-batches done and their total in the current update. Raises
        ``StepOutOfTurn``, ``BadBatch``, and, if ``config.refusals.action`` is ``stop``,
        ``NonFiniteGradient`` or ``ExplodingGradient``.
        """
        started = time.perf_counter()
        try:
            return self._make_step(samples, step, on_progress)
        except (NonFiniteGradient, ExplodingGradient) as error:
            refused = self.config.refusals.record(step, samples, error)
            if refused.action == "stop":
                raise type(error)(f"{error}. The batch is in {refused.batch}" if refused.batch else str(error)) from error
            if self._restore_point is not None:
                self.optimizers.restore(self._restore_point[0])
                self.models.kl_coefficient = self._restore_point[1]
            self.step = step
            metrics = describe_batch(samples, step=step, sampled=self.algorithm.needs.sampled)
            metrics |= {"refused": 1.0, "learning_rate": self.config.schedule.rate(step)}
            return StepResult(step, metrics | {"time/step": time.perf_counter() - started})

    def _make_step(self, samples: Sequence[TrainSample], step: int, on_progress: Callable[[int, int], None] | None) -> StepResult:
        if step != self.step + 1:
            raise StepOutOfTurn(f"step {step} was requested, but the learner is at step {self.step}")
        started = time.perf_counter()
        self._use_threads()
        ordered = _in_order(samples)
        metrics = describe_batch(ordered, step=step, sampled=self.algorithm.needs.sampled)
        self.models.algorithm = self.algorithm
        timer, sums, updates = PhaseTimer(), TokenSums(), UpdateMeans()
        several = self.algorithm.updates.count > 1
        before = self.optimizers.snapshot() if several else []
        warming = step <= self.algorithm.critic_warmup_steps
        rate = 0.0 if warming else self.config.schedule.rate(step)
        try:
            objective = FAMILIES[self.algorithm.family](self.models, ordered, step)
            for batches in objective.updates():
                if not updates.count:
                    metrics["time/pack"] = time.perf_counter() - started
                loss, done = 0.0, 0
                for batch, mine in self.ranks.deal(batches):
                    loss += self._accumulate(objective, batch, mine, sums, timer)
                    done = min(done + self.ranks.size, len(batches))
                    if on_progress is not None:
                        on_progress(done, len(batches))
                loss, norms = self._reduce(loss, self.optimizers.norms())
                check_gradient(loss, norms, rate, self.config.refuse_grad_norm)
                with timer.measure("optimizer"):
                    self.optimizers.step((rate, self._critic_rate(step)), norms)
                updates.add(loss, norms, sum(batch.computed for batch in batches))
        except BaseException:
            self.optimizers.clear()
            if several:
                self.optimizers.restore(before)
            raise
        self.step = step
        sums.merge(self.ranks.exchange(sums))
        seconds = time.perf_counter() - started
        if self.algorithm.needs.sampled:
            metrics |= sampled_entropy(ordered)
        metrics |= objective.metrics | sums.means() | timer.seconds() | updates.metrics()
        metrics |= {
            "learning_rate": rate,
            "tokens_per_second": metrics["tokens"] / seconds,
            "samples_per_second": metrics["samples"] / seconds,
            "time/step": seconds,
        }
        if warming:
            del metrics["grad_norm"]  # the policy has no gradient
        self._control_kl(metrics, adapts=not warming)
        return StepResult(step=step, metrics=metrics, advantages=objective.advantages())

    @torch.no_grad()
    def evaluate(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """The loss and the algorithm's other metrics on held-out samples. Changes no state. Raises
        ``BadBatch``."""
        self._use_threads()
        models = replace(self.models, cache=self._held_out)
        objective = FAMILIES[self.algorithm.family](models, _in_order(samples), self.step)
        loss, sums = 0.0, TokenSums()
        for batches in objective.updates():
            for batch, mine in self.ranks.deal(batches):
                part = objective.part(batch)
                if mine:
                    loss += float(part.loss)
                    sums.add(part.count, part.sums, part.maxima, part.shares)
        loss, _ = self._reduce(loss, [])
        sums.merge(self.ranks.exchange(sums))
        return {"loss": loss} | sums.means()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights under their Hugging Face names, with adapters merged.

        On one rank the tensors are live: the next step changes them. With several ranks each tensor
        is gathered when it is requested, so every rank must iterate over all of them.
        """
        return self.policy.named_weights()

    def weights_digest(self) -> WeightsDigest:
        """The digest of the current weights. With several ranks only one tensor is gathered at a
        time."""
        if self.ranks.size > 1:
            return streamed_digest(self.policy.named_weights())[0]
        return weights_digest(self.named_weights())

    def write_weights(
        self, directory: str | os.PathLike[str], *, fsync: bool = True, staging: Path | None = None
    ) -> WeightsManifest:
        """Write the weights as a folder that ``from_pretrained`` loads, with the step as version.
        See ``weights.write_weights``."""
        return write_weights(
            directory,
            self.named_weights(),
            config_source_dir=self.config_folder,
            version=self.step,
            fsync=fsync,
            staging=staging,
        )

    @property
    def adapts(self) -> bool:
        """Whether only adapters are trained."""
        return self.policy.adapter is not None

    def adapted(self) -> tuple[Mapping[str, Tensor], tuple[WeightsDigest, Mapping[str, Tensor]]]:
        """The gathered adapters, and ``streamed_digest`` of the weights with the adapters
        merged."""
        adapter = self.policy.adapter
        assert adapter is not None
        adapters = {name: whole(tensor.detach()) for name, tensor in adapter.tensors().items()}
        return adapters, streamed_digest(adapter.merged())

    def gather_adapted(self) -> Iterator[Tensor]:
        """What ``adapted`` of another rank gathers; this one hashes nothing."""
        adapter = self.policy.adapter
        assert adapter is not None
        yield from (whole(tensor.detach()) for tensor in adapter.tensors().values())
        yield from (tensor for _, tensor in adapter.merged())

    def write_adapter(self, directory: str | os.PathLike[str]) -> WeightsManifest:
        """Write only the adapters, as a folder that ``from_pretrained`` loads while the run's model
        stays where it is."""
        adapter = self.policy.adapter
        assert adapter is not None
        adapters, merged = self.adapted()
        return write_adapter(
            directory,
            adapters,
            merged,
            settings=lambda folder: adapter.save_settings(folder, self.model_dir),
            config_source_dir=self.config_folder,
            version=self.step,
        )

    def save_state(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Write everything that ``load_state`` needs to continue bit for bit. Returns the files,
        relative to the folder. Each rank writes its part."""
        return self.begin_save(directory).result()

    def begin_save(self, directory: str | os.PathLike[str]) -> Saving:
        """``save_state`` of a copy, in a thread: the next step may begin when this returns, and the
        state is written when its ``result`` does. Waits for the save before."""
        if self._saving is not None:
            with suppress(Exception):  # its caller gets the error
                self._saving.result()
        self._saving = save_state(Path(directory), self)
        self.mark()
        return self._saving

    def load_state(self, directory: str | os.PathLike[str], step: int | None = None) -> None:
        """Continue from a saved state; with ``step`` as if it was the state of that step. Raises
        ``StateUnreadable`` and changes nothing if that is not possible."""
        load_state(Path(directory), self)
        self.step = self.step if step is None else step
        self.mark()

    def restore_point(self) -> None:
        """Make the current state the one that a refused gradient restores."""
        self.mark()

    def mark(self) -> None:
        """``restore_point`` on this rank only. Does nothing unless ``config.refusals.action`` is
        ``restore``."""
        if self.config.refusals.action == "restore":
            self._restore_point = (self.optimizers.snapshot(), self.models.kl_coefficient)

    def _accumulate(self, objective: Objective, batch: MicroBatch, mine: bool, sums: TokenSums, timer: PhaseTimer) -> float:
        """Add the gradient of a micro-batch and return its loss. mine: False if another rank counts
        this micro-batch."""
        with timer.measure("forward"):
            part = objective.part(batch)
            loss = float(part.loss.detach()) if mine else 0.0
            if mine:
                sums.add(part.count, part.sums, part.maxima, part.shares)
        with timer.measure("backward"):
            self.optimizers.add(self.ranks.gradients(part.loss if mine else part.loss * 0.0, self.optimizers.parameters))
        return loss

    def _reduce(self, loss: float, norms: list[float]) -> tuple[float, list[float]]:
        """The loss and the gradient norms of the whole batch from those of each rank."""
        if self.ranks.size == 1:
            return loss, norms
        found = self.ranks.exchange((loss, norms))
        squares = [sum(norm * norm for norm in of_one) for of_one in zip(*(norms for _, norms in found), strict=True)]
        return sum(loss for loss, _ in found), [math.sqrt(square) for square in squares]

    def _control_kl(self, metrics: dict[str, float], *, adapts: bool) -> None:
        adapt, measured = self.algorithm.next_kl_coefficient, metrics.get("kl/reference")
        if self.algorithm.initial_kl_coefficient > 0:
            metrics["kl/coefficient"] = self.models.kl_coefficient
        if adapts and adapt is not None and measured is not None:
            self.models.kl_coefficient = adapt(self.models.kl_coefficient, measured, int(metrics["samples"]))

    def _critic_rate(self, step: int) -> float:
        peak = getattr(self.config.settings, "critic_learning_rate", self.config.schedule.peak)
        return peak * self.config.schedule.rate(step) / self.config.schedule.peak

    def _use_threads(self) -> None:
        threads = self.config.threads or os.cpu_count() or 1
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def check_gradient(loss: float, norms: Sequence[float], rate: float, limit: float) -> None:
    """Raise ``NonFiniteGradient``, or ``ExplodingGradient`` if the policy's norm exceeds ``limit``
    (0: no limit)."""
    values = f"loss {loss:.6g}, gradient norm {norms[0]:.6g}"
    fix = (
        "Check the batch's logprobs and rewards. A run's settings are fixed: start another one with `rollout run --config FILE "
        f"--from RUN --continue` and a lower `train.learning_rate` (here {rate:g})"
    )
    skip = '`train.on_refused_gradient = "skip"`'
    if not (math.isfinite(loss) and all(map(math.isfinite, norms))):
        raise NonFiniteGradient(f"{values}. The step was not made. {fix} or {skip}")
    if limit and norms[0] > limit:
        exceeded = f"{values}, above `train.refuse_grad_norm` = {limit:g}. The step was not made."
        raise ExplodingGradient(f"{exceeded} {fix}, a higher limit, or {skip}")


def _teacher(policy: Policy, algorithm: Algorithm, config: TrainerConfig, ranks: Ranks) -> Teacher | None:
    directory = getattr(config.settings, "teacher", "")
    return Teacher(directory, policy, ranks) if algorithm.needs.teacher and directory else None


def _critic(
    policy: Policy, algorithm: Algorithm, config: TrainerConfig, model_dir: str | os.PathLike[str], ranks: Ranks
) -> Critic | None:
    if not algorithm.needs.critic:
        return None
    network = getattr(config.settings, "critic", "head") == "network"
    return Critic(policy, model_dir if network else None, checkpointing=config.gradient_checkpointing, ranks=ranks)


def _in_order(samples: Sequence[TrainSample]) -> list[TrainSample]:
    """The samples by group and place in it, after a check of their shapes. Raises ``BadBatch``."""
    if not samples:
        raise BadBatch("the batch has no samples")
    for sample in samples:
        length = len(sample.token_ids)
        if not (length == len(sample.loss_mask) == len(sample.logprobs) and 0 <= sample.prompt_length <= length):
            raise BadBatch(
                f"sample {sample.sample} of group {sample.group_key}: {length} tokens, {len(sample.loss_mask)} mask values, "
                f"{len(sample.logprobs)} logprobs, prompt of {sample.prompt_length}; the first three must be equal and the "
                "prompt no longer"
            )
    return sorted(samples, key=lambda sample: (sample.group_key, sample.sample))
