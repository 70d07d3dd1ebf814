"""The learner: batches in, weights forward by one step each."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout_workers.algorithms import Algorithm, build_algorithm
from rollout_workers.devices import repeat_bits
from rollout_workers.trainer.companions import companions_of
from rollout_workers.trainer.distributed.ranks import ALONE, Ranks
from rollout_workers.trainer.metrics import TokenSums, describe_batch
from rollout_workers.trainer.model.adapter import LoraConfig
from rollout_workers.trainer.model.critic import Critic
from rollout_workers.trainer.model.policy import Policy
from rollout_workers.trainer.model.reference import Reference, ReferenceCache
from rollout_workers.trainer.model.scorer import Scorer
from rollout_workers.trainer.model.teacher import Teacher
from rollout_workers.trainer.objective import FAMILIES, Machine, Objective
from rollout_workers.trainer.optim.moments import AdamWConfig
from rollout_workers.trainer.optim.optimizer import FlatAdamW
from rollout_workers.trainer.optim.schedule import Schedule
from rollout_workers.trainer.packing import MicroBatch
from rollout_workers.trainer.refusal import Refusals
from rollout_workers.trainer.state import State, capture, load_state, write_state
from rollout_workers.trainer.tally import Clock, Updates
from rollout_workers.trainer.types import (
    BadBatch,
    ExplodingGradient,
    NonFiniteGradient,
    StepOutOfTurn,
    StepResult,
    TrainSample,
)
from rollout_workers.weights import WeightsDigest, WeightsManifest, weights_digest, write_adapter, write_weights


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """Settings of a learner, by the names of the run config."""

    algorithm: str = "grpo"
    settings: Any = None
    """``SftConfig`` or ``GrpoConfig``; absent: the algorithm's defaults."""
    schedule: Schedule = field(default_factory=lambda: Schedule(peak=1e-6))
    optimizer: AdamWConfig = field(default_factory=AdamWConfig)
    temperature: float = 1.0
    """What completions were sampled with. 0 (greedy) counts as 1."""
    tokens_per_microbatch: int = 16_384
    """Most positions, padding included, of one forward and backward pass. Never changes the gradient beyond rounding."""
    threads: int = 0
    """CPU threads while a step runs; 0: all cores. Part of what makes bits repeatable."""
    dtype: torch.dtype = torch.float32
    seed: int = 0
    lora: LoraConfig | None = None
    """Adapters, which alone are trained; the reference model is then the model without them."""
    freeze: tuple[str, ...] = ()
    """Patterns over names of tensors that stay as they are."""
    gradient_checkpointing: bool = False
    refuse_grad_norm: float = 0.0
    """A gradient of a larger norm is refused as one that is not finite is; 0: none is too large."""
    refusals: Refusals = field(default_factory=Refusals)
    """What is done then."""


class Trainer:
    """A model in training.

    Deterministic: the same model, config and batches give the same bits, whatever the order within a batch, with the same
    number of threads and ranks. Not safe for use from two threads at a time; ``train_step`` blocks: call it from a thread beside
    an event loop. A step that raises leaves weights, optimizer and step as they were.

    Over several ranks there is one of it in each process, and every call must be made on all of them, with the same arguments
    (``leading``). A ``LearnerError`` is then raised on all; after any other one that reaches only some of them none can go on.
    """

    def __init__(self, model_dir: str | os.PathLike[str], config: TrainerConfig, ranks: Ranks = ALONE) -> None:
        """Load the model of a folder in the Hugging Face layout, at step 0. Raises ``OSError`` where it can't be loaded."""
        self.ranks = ranks
        self.model_dir = Path(model_dir)
        self.config = config
        self.algorithm: Algorithm = build_algorithm(config.algorithm, config.settings)
        self.step = 0
        self._use_threads()
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
            device=ranks.loading_device,
        )
        self.machine = Machine(
            self.policy,
            self.algorithm,
            temperature=(config.temperature or 1.0) if self.algorithm.needs.sampled else 1.0,
            tokens=config.tokens_per_microbatch,
            seed=config.seed,
            reference=Reference(self.policy, model_dir) if self.algorithm.needs.reference else None,
            critic=_critic(self.policy, self.algorithm, config, model_dir),
            teacher=_teacher(self.policy, self.algorithm, config),
            kl_coefficient=self.algorithm.initial_kl_coefficient,
            ranks=ranks,
        )
        self._held_out = ReferenceCache()  # no part of the state: data that is trained on has its own
        critic = self.machine.critic
        for model in (self.policy, self.machine.reference, critic, self.machine.teacher):
            if model is not None:
                model.shard(ranks)
        self.optimizer = FlatAdamW(self.policy.model, config.optimizer, beside=critic if critic and critic.on_policy else None)
        self.critic_optimizer = (
            FlatAdamW(critic, replace(config.optimizer, ema_decay=0.0)) if critic and not critic.on_policy else None
        )
        self._parameters = [*self.optimizer.parameters, *(self.critic_optimizer.parameters if self.critic_optimizer else [])]
        self.companions = companions_of(self.policy, self.model_dir)
        self._point: tuple[list[list[Tensor]], float] | None = None
        self.mark()

    def train_step(
        self,
        samples: Sequence[TrainSample],
        step: int,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> StepResult:
        """Make step ``step`` (one past ``self.step``) from a batch, in any order: one update of the weights, or as many as the
        algorithm makes of a batch.

        ``on_progress`` is called with micro-batches done and in all, of the update in hand. Raises ``StepOutOfTurn``,
        ``BadBatch``, and unless ``config.refusals`` goes on without them ``NonFiniteGradient`` or ``ExplodingGradient``.
        """
        started = time.perf_counter()
        try:
            return self._make_step(samples, step, on_progress)
        except (NonFiniteGradient, ExplodingGradient) as error:
            refused = self.config.refusals.meet(step, samples, error)
            if refused.action == "stop":
                raise type(error)(f"{error}. The batch is kept in {refused.batch}" if refused.batch else str(error)) from error
            if self._point is not None:
                self._recall(self._point[0])
                self.machine.kl_coefficient = self._point[1]
            self.step = step
            metrics = describe_batch(samples, step=step, sampled=self.algorithm.needs.sampled)
            metrics |= {"refused": 1.0, "learning_rate": self.config.schedule.rate(step)}
            return StepResult(step, metrics | {"time/step": time.perf_counter() - started})

    def _make_step(self, samples: Sequence[TrainSample], step: int, on_progress: Callable[[int, int], None] | None) -> StepResult:
        if step != self.step + 1:
            raise StepOutOfTurn(f"step {step} was asked for, but the learner stands at step {self.step}")
        started = time.perf_counter()
        self._use_threads()
        ordered = _in_order(samples)
        metrics = describe_batch(ordered, step=step, sampled=self.algorithm.needs.sampled)
        self.machine.algorithm = self.algorithm
        clock, sums, updates = Clock(), TokenSums(), Updates()
        several = self.algorithm.updates.count > 1
        before = self._remember() if several else []
        rate = self.config.schedule.rate(step)
        try:
            objective = FAMILIES[self.algorithm.family](self.machine, ordered, step)
            for batches in objective.updates():
                if not updates.count:
                    metrics["time/pack"] = time.perf_counter() - started
                loss, done = 0.0, 0
                for batch, mine in self.ranks.deal(batches):
                    loss += self._accumulate(objective, batch, mine, sums, clock)
                    done = min(done + self.ranks.size, len(batches))
                    if on_progress is not None:
                        on_progress(done, len(batches))
                loss, norms = self._agree(loss, [optimizer.norm() for optimizer in self._optimizers])
                self._check(loss, norms, rate)
                with clock.measure("optimizer"):
                    self.optimizer.step(rate, norms[0])
                    if self.critic_optimizer is not None:
                        self.critic_optimizer.step(self._critic_rate(step), norms[1])
                updates.add(loss, norms, sum(batch.computed for batch in batches))
        except BaseException:
            for optimizer in self._optimizers:
                optimizer.clear()
            if several:
                self._recall(before)
            raise
        self.step = step
        sums.merge(self.ranks.exchange(sums))
        seconds = time.perf_counter() - started
        metrics |= objective.metrics | sums.means() | clock.seconds() | updates.metrics()
        metrics |= {
            "learning_rate": rate,
            "tokens_per_second": metrics["tokens"] / seconds,
            "samples_per_second": metrics["samples"] / seconds,
            "time/step": seconds,
        }
        self._control_kl(metrics)
        return StepResult(step=step, metrics=metrics, advantages=objective.advantages())

    @torch.no_grad()
    def evaluate(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """The loss on held-out samples, and the algorithm's other numbers, as a step on them would tell. Changes nothing that a
        later step computes. Raises ``BadBatch``."""
        self._use_threads()
        machine = replace(self.machine, cache=self._held_out)
        objective = FAMILIES[self.algorithm.family](machine, _in_order(samples), self.step)
        loss, sums = 0.0, TokenSums()
        for batches in objective.updates():
            for batch, mine in self.ranks.deal(batches):
                part = objective.part(batch)
                if mine:
                    loss += float(part.loss)
                    sums.add(part.count, part.sums)
        loss, _ = self._agree(loss, [])
        sums.merge(self.ranks.exchange(sums))
        return {"loss": loss} | sums.means()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights under their Hugging Face names, adapters merged in. Live ones where there is one rank: they change with the
        next step; over several they are gathered, each when it is asked for, so every rank must ask for all."""
        return self.policy.named_weights()

    def weights_digest(self) -> WeightsDigest:
        """Digest of the weights as they stand."""
        return weights_digest(self.named_weights())

    def write_weights(
        self, directory: str | os.PathLike[str], *, fsync: bool = True, staging: Path | None = None
    ) -> WeightsManifest:
        """Write the weights as a folder that ``from_pretrained`` loads; the step is their version. Arguments of the module's
        ``write_weights``."""
        return write_weights(
            directory, self.named_weights(), config_source_dir=self.companions, version=self.step, fsync=fsync, staging=staging
        )

    @property
    def adapts(self) -> bool:
        """Whether adapters alone are trained."""
        return self.policy.adapter is not None

    def write_adapter(self, directory: str | os.PathLike[str]) -> WeightsManifest:
        """Write the adapters alone as a folder that ``from_pretrained`` loads, too, while the run's model is where it was."""
        adapter = self.policy.adapter
        assert adapter is not None
        return write_adapter(
            directory,
            adapter.tensors(),
            adapter.merged(),
            settings=lambda folder: adapter.save_settings(folder, str(self.model_dir.absolute())),
            config_source_dir=self.companions,
            version=self.step,
        )

    def save_state(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Write all that ``load_state`` needs to go on bit for bit. Returns the files, relative to the folder."""
        files = write_state(Path(directory), self.capture())
        self.mark()
        return files

    def capture(self) -> State:
        """All that a state holds, whole."""
        return capture(self)

    def load_state(self, directory: str | os.PathLike[str]) -> None:
        """Stand where ``save_state`` stood. Raises ``StateUnreadable``, and then the trainer is as it was."""
        load_state(Path(directory), self)
        self.mark()

    def restore_point(self) -> None:
        """What a refusal goes back to is what stands now, as where the state is saved."""
        self.mark()

    def mark(self) -> None:
        """The state was saved or loaded: what a refusal goes back to, where it does."""
        if self.config.refusals.action == "restore":
            self._point = (self._remember(), self.machine.kl_coefficient)

    @property
    def _optimizers(self) -> list[FlatAdamW]:
        return [self.optimizer] if self.critic_optimizer is None else [self.optimizer, self.critic_optimizer]

    def _accumulate(self, objective: Objective, batch: MicroBatch, mine: bool, sums: TokenSums, clock: Clock) -> float:
        """Add a micro-batch's gradient; returns its part of the loss. mine: whether it counts; else another rank counts it."""
        with clock.measure("forward"):
            part = objective.part(batch)
            loss = float(part.loss.detach()) if mine else 0.0
            if mine:
                sums.add(part.count, part.sums)
        with clock.measure("backward"):
            gradients = self.ranks.gradients(part.loss if mine else part.loss * 0.0, self._parameters)
            held = len(self.optimizer.parameters)
            self.optimizer.add(gradients[:held])
            if self.critic_optimizer is not None:
                self.critic_optimizer.add(gradients[held:])
        return loss

    def _agree(self, loss: float, norms: list[float]) -> tuple[float, list[float]]:
        """Loss and norms of the whole batch from those of each rank, the same numbers on all."""
        if self.ranks.size == 1:
            return loss, norms
        found = self.ranks.exchange((loss, norms))
        squares = [sum(norm * norm for norm in of_one) for of_one in zip(*(norms for _, norms in found), strict=True)]
        return sum(loss for loss, _ in found), [math.sqrt(square) for square in squares]

    def _check(self, loss: float, norms: Sequence[float], rate: float) -> None:
        """Refuse an update that would spoil the weights."""
        told = f"loss {loss:.6g}, gradient norm {norms[0]:.6g}"
        fix = (
            "Look at the batch's logprobs and rewards. A run's settings are fixed: `rollout run --config FILE --from RUN` starts"
            f" another with a lower `train.learning_rate` (here it was {rate:g})"
        )
        other = '`train.on_refused_gradient = "skip"`'
        if not (math.isfinite(loss) and all(map(math.isfinite, norms))):
            raise NonFiniteGradient(f"{told}. The step was not made. {fix} or {other}")
        limit = self.config.refuse_grad_norm
        if limit and norms[0] > limit:
            raised = f"{told}, beyond `train.refuse_grad_norm` = {limit:g}. The step was not made."
            raise ExplodingGradient(f"{raised} {fix}, a higher limit or {other}")

    def _control_kl(self, metrics: dict[str, float]) -> None:
        adapt, measured = self.algorithm.next_kl_coefficient, metrics.get("kl/reference")
        if self.algorithm.initial_kl_coefficient > 0:
            metrics["kl/coefficient"] = self.machine.kl_coefficient
        if adapt is not None and measured is not None:
            self.machine.kl_coefficient = adapt(self.machine.kl_coefficient, measured, int(metrics["samples"]))

    def _critic_rate(self, step: int) -> float:
        peak = getattr(self.config.settings, "critic_learning_rate", self.config.schedule.peak)
        return peak * self.config.schedule.rate(step) / self.config.schedule.peak

    def _remember(self) -> list[list[Tensor]]:
        return [optimizer.remember() for optimizer in self._optimizers]

    def _recall(self, copies: list[list[Tensor]]) -> None:
        for optimizer, held in zip(self._optimizers, copies, strict=True):
            optimizer.recall(held)

    def _use_threads(self) -> None:
        threads = self.config.threads or os.cpu_count() or 1
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def _teacher(policy: Policy, algorithm: Algorithm, config: TrainerConfig) -> Teacher | None:
    directory = getattr(config.settings, "teacher", "")
    return Teacher(directory, policy) if algorithm.needs.teacher and directory else None


def _critic(policy: Policy, algorithm: Algorithm, config: TrainerConfig, model_dir: str | os.PathLike[str]) -> Critic | None:
    if not algorithm.needs.critic:
        return None
    own = getattr(config.settings, "critic", "head") == "network"
    return Critic(policy, model_dir if own else None, checkpointing=config.gradient_checkpointing)


def _in_order(samples: Sequence[TrainSample]) -> list[TrainSample]:
    """The samples by group and place, after a look at their shapes. Raises ``BadBatch``."""
    if not samples:
        raise BadBatch("the batch holds no sample")
    for sample in samples:
        length = len(sample.token_ids)
        if not (length == len(sample.loss_mask) == len(sample.logprobs) and 0 <= sample.prompt_length <= length):
            raise BadBatch(
                f"sample {sample.sample} of group {sample.group_key}: {length} tokens, {len(sample.loss_mask)} mask values, "
                f"{len(sample.logprobs)} logprobs, prompt of {sample.prompt_length}; the three must be equal, the prompt "
                "no longer"
            )
    return sorted(samples, key=lambda sample: (sample.group_key, sample.sample))
